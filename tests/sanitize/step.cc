#include "step.h"

#include "meeting/registry.h"

namespace driver {
namespace {

constexpr int kLarge = 25000;    // values of a sample: from three samples on, work for more than one thread
constexpr double kBefore = 0.5;  // what is in an array before the core writes to it, or adds, or leaves it alone

std::string context_name(size_t context) { return "cpu(" + std::to_string(context) + ")"; }

}  // namespace

// ---- layers ----------------------------------------------------------------------------------------------------

Spec any_spec(Random& random, int contexts) {
    Spec spec;
    spec.contexts = contexts;
    spec.mode = static_cast<Mode>(random.whole(0, 2));
    if (spec.mode == Mode::kSync && random.one_in(3))
        spec.group = random.one_of<int>({1, contexts % 2 == 0 ? 2 : 1, contexts});
    spec.virtual_devices = random.whole(1, 3);
    spec.type = static_cast<Type>(random.whole(0, 2));
    spec.channels = random.whole(1, 5);
    spec.channels_last = random.one_in(4);
    spec.fix_gamma = random.one_in(4);
    spec.slope = random.one_of<double>({1, 0, 0.25});
    spec.adds = random.one_in(3);
    if (!random.one_in(4)) spec.exchange = any_exchange(random);
    return spec;
}

Spec any_meeting_spec(Random& random, int contexts) {
    for (;;) {
        const Spec spec = any_spec(random, contexts);
        if (spec.mode != Mode::kLocal) return spec;
    }
}

Parameters::Parameters(Type data, int channels) {
    const auto vector = [&](double value) { return make_array(syncbn::parameter_type_of(data), channels, value); };
    gamma = vector(1);
    beta = vector(0);
    running_mean = vector(0);
    running_var = vector(1);
}

Layer::Layer(Random& random, const Spec& spec, const std::string& name)
    : spec(spec),
      name(name),
      id(syncbn_layer_create(name.c_str(), static_cast<int>(spec.mode), spec.virtual_devices, spec.group, {}, 0,
                             spec.exchange != nullptr ? *spec.exchange : nullptr)) {
    if (syncbn::sharing_of({spec.mode, spec.virtual_devices, spec.group, {}}) == syncbn::Sharing::kEach) gathers(id);
    for (int i = 0; i < spec.contexts; ++i) {
        parameters.emplace_back(spec.type, spec.channels);
        for (int c = 0; c < spec.channels; ++c) {
            parameters[i].gamma->set(c, 0.5 + random.whole(0, 8) / 8.0);
            parameters[i].beta->set(c, random.whole(-4, 4) / 8.0);
        }
    }
    if (spec.exchange != nullptr) set_exchange(spec.exchange);
    place(spec.contexts);
}

syncbn::NodePtr Layer::node(int number) const {
    syncbn::Node node;
    node.layer = syncbn::registry().find(id);
    node.activation = {spec.slope};
    node.adds = spec.adds;
    node.number = number;
    node.fix_gamma = spec.fix_gamma;
    node.list_roles();
    return std::make_shared<const syncbn::Node>(std::move(node));
}

void Layer::place(int contexts) const {
    replaced_ = contexts != spec.contexts;
    std::vector<std::string> names;
    std::vector<const char*> texts;
    for (int i = 0; i < contexts; ++i) names.push_back(context_name(i));
    for (const std::string& name : names) texts.push_back(name.c_str());
    syncbn_layer_place(id, {contexts, texts.data()});
}

void Layer::set_timeout(double seconds) const {
    syncbn::registry().change(*syncbn::registry().find(id), [&](auto& own) { own.own_timeout = seconds; });
}

void Layer::set_exchange(Asked* const* exchange) const {
    syncbn::registry().change(*syncbn::registry().find(id), [&](auto& own) {
        own.own_exchange = **exchange;
        own.agreed = std::make_shared<const syncbn::Agreed>(syncbn::Agreed{{}, id, 0});
        own.agreed_over = own.own_exchange.host.get();
    });
}

void Layer::drop() const { syncbn_layer_drop(id); }

void Layer::restore() const {
    if (replaced_) place(spec.contexts);
    renew_exchanges();
    // Also where the layer had none of its own: it may have been given one that is broken by now.
    set_exchange(spec.exchange != nullptr ? spec.exchange : exchange_in_memory());
    set_timeout(0);
    syncbn_seed(kSeed);
}

// ---- replicas --------------------------------------------------------------------------------------------------

Replica::Replica(Random& random, const Layer& layer, size_t context, int node, const Manner& manner, int height)
    : layer(layer),
      context(context_name(context)),
      node(node),
      training(manner.training),
      samples(random.whole(1, 5)),
      height(height),
      channels(layer.spec.channels),
      parameters(layer.parameters[context]),
      // The backward of an activation is about what y is, without what was there before.
      req(layer.spec.slope != 1 || !random.one_in(4) ? syncbn::kWrite : syncbn::kNull) {
    fill(random, layer.spec.type, manner.backwards);
}

void Replica::fill(Random& random, Type type, size_t count) {
    const int64_t size = samples * channels * height;
    const auto normal = [&](double offset, double scale) {
        const ArrayP out = make_array(type, size, 0);
        for (int64_t i = 0; i < size; ++i) out->set(i, offset + scale * random.normal());
        return out;
    };
    x = normal(random.whole(-2, 2), 1 + random.whole(0, 3));
    if (layer.spec.adds) addend = normal(0, 1);
    backwards.clear();
    for (size_t k = 0; k < count; ++k) {
        const auto vector = [&] { return make_array(parameters.gamma->type, channels, kBefore); };
        const auto data = [&] { return make_array(type, size, kBefore); };
        backwards.push_back({normal(0, 1), {data(), vector(), vector()}, {}, {}});
        if (addend) backwards[k].gradients.push_back(data());
        for (size_t i = 0; i < backwards[k].gradients.size(); ++i)
            backwards[k].reqs.push_back(
                random.one_of<int>({syncbn::kWrite, syncbn::kWrite, syncbn::kAdd, syncbn::kNull}));
    }
}

void Replica::become(Random& random, Type type, int new_channels) {
    channels = new_channels;
    parameters = Parameters(type, new_channels);
    fill(random, type, backwards.size());
}

// MXNet runs the operators that write the same running statistics one after the other.
void Replica::push(Engine& engine, bool backward, Given given, Outcome& outcome) const {
    const std::pair<syncbn::Role, ArrayP> inputs[] = {{syncbn::kX, x},
                                                      {syncbn::kGamma, parameters.gamma},
                                                      {syncbn::kBeta, parameters.beta},
                                                      {syncbn::kAddend, addend},
                                                      {syncbn::kRunningMean, parameters.running_mean},
                                                      {syncbn::kRunningVar, parameters.running_var}};
    for (const auto& [role, array] : inputs) given.emplace(role, std::pair{array, syncbn::kNull});
    engine.push(parameters.running_mean.get(), [=, &outcome, call = call_, training = training] {
        syncbn::Arrays arrays;
        for (const auto& [role, of] : given) {
            arrays.of[role].handle = of.first.get();
            arrays.requests[role] = of.second;
        }
        const auto in_core = [&](const auto& half) {
            const Within core(true);
            return half();
        };
        const auto end = [&] { in_core([&] { return call->end(), true; }); };
        try {
            if (in_core([&] { return call->begin(backward, arrays, training); }))
                end();
            else
                std::async(std::launch::async, end).get();  // the rest waits, which no thread of the engine may do
        } catch (const std::exception& error) {
            ++figures.failures;
            try {
                std::rethrow_exception(call->end_step(error));
            } catch (const std::exception& told) {
                outcome.error = told.what();
            }
        }
        outcome.ended = true;
    });
}

void Replica::issue_forward(Engine& engine) {
    try {
        const Within core(true);
        const size_t id = static_cast<size_t>(layer.id), number = static_cast<size_t>(node);
        if (call_ && training) {
            syncbn_begin_graph(context.c_str(), {1, &id}, {1, &number}, {0, nullptr});
            syncbn_end_graph({0, nullptr});
        } else if (!call_) {
            syncbn::Shape shape{samples, channels, height};
            if (layer.spec.channels_last) shape = {samples * height, channels, 1};
            call_ = syncbn::host_call(layer.node(node), context, {x->type, shape, samples, {}, {}});
            if (training) call_->issue();
        }
    } catch (const std::exception& error) {
        ++figures.failures;
        forward.error = error.what();
        differentiated = false;
        return;
    }
    y = make_array(x->type, x->size, kBefore);
    push(engine, false, {{syncbn::kY, {y, req}}}, forward);
}

void Replica::issue_backward(Engine& engine, Backward& backward) {
    Given given{{syncbn::kDy, {backward.dy, syncbn::kNull}}, {syncbn::kY, {y, syncbn::kNull}}};
    const syncbn::Role written[] = {syncbn::kDx, syncbn::kDgamma, syncbn::kDbeta, syncbn::kDaddend};
    for (size_t i = 0; i < backward.gradients.size(); ++i)
        given[written[i]] = {backward.gradients[i], backward.reqs[i]};
    push(engine, true, given, backward.outcome);
}

void Replica::repeat(Random& random, const Replica& earlier) {
    context = earlier.context;
    parameters = earlier.parameters;
    samples = earlier.samples;
    height = earlier.height;
    call_ = earlier.call_;
    fill(random, x->type, backwards.size());
}

// ---- steps -----------------------------------------------------------------------------------------------------

Manner::Manner(Random& random, bool threads) : threads(threads) {
    graph = random.one_in(2);
    // An eager call that predicts is plain BatchNorm's.
    training = !graph || !random.one_in(8);
    uses = random.whole(1, kNodes);
    backwards = random.whole(0, 3);
    large = random.one_in(200);
}

Step::Step(Run& run, const std::vector<Layer*>& layers, const Manner& manner)
    : run_(run), manner_(manner), calls_(manner.uses) {
    Random& random = run.random;
    const auto order = random.order(layers[0]->spec.contexts);
    const int usual = random.one_of<int>({1, 2, 3, 16, 17});
    for (int use = 0; use < manner.uses; ++use)
        for (const Layer* layer : layers) {
            calls_[use].emplace_back();
            for (size_t context : order) {
                const int height = manner.large && context == 0 ? kLarge / layer->spec.channels : usual;
                calls_[use].back().push_back(
                    std::make_unique<Replica>(random, *layer, context, manner.graph ? use : kEager, manner, height));
            }
        }
}

void Step::each(const std::function<void(Replica&)>& work) {
    for (auto& use : calls_)
        for (auto& call : use)
            for (auto& replica : call) work(*replica);
}

void Step::repeat(const Step& earlier) {
    for (size_t use = 0; use < calls_.size(); ++use)
        for (size_t layer = 0; layer < calls_[use].size(); ++layer)
            for (size_t i = 0; i < calls_[use][layer].size(); ++i)
                calls_[use][layer][i]->repeat(run_.random, *earlier.calls_[use][layer][i]);
}

void Step::issue_forwards_of(size_t replica, uint64_t seed) {
    Random random(seed);
    for (auto& use : calls_)
        for (size_t layer : random.order(use.size()))  // branches of a net, in any order on each device
            if (use[layer][replica]->called) use[layer][replica]->issue_forward(run_.engine);
}

void Step::issue_forwards() {
    std::vector<std::thread> threads;
    for (size_t replica = 0; replica < call().size(); ++replica) {
        const uint64_t seed = run_.random.seed();
        if (manner_.threads)
            threads.emplace_back(&Step::issue_forwards_of, this, replica, seed);
        else
            issue_forwards_of(replica, seed);
    }
    for (auto& thread : threads) thread.join();
}

void Step::issue_backwards() {
    for (int k = 0; k < manner_.backwards; ++k)
        for (size_t replica : run_.random.order(call().size()))
            for (auto use = calls_.rbegin(); use != calls_.rend(); ++use)
                for (Call& call : *use) {
                    Replica& part = *call[replica];
                    if (part.called && part.differentiated) part.issue_backward(run_.engine, part.backwards[k]);
                }
}

void Step::issue() {
    ++figures.steps;
    issue_forwards();
    issue_backwards();
}

// ---- checks ----------------------------------------------------------------------------------------------------

void check_values(const ArrayP& got, int req, bool failed) {
    if (!got || req == syncbn::kNull || got->broken) return;
    int64_t numbers = 0;
    for (int64_t i = 0; i < got->size; ++i) numbers += !std::isnan(got->get(i));
    expect(numbers == (failed ? 0 : got->size), std::to_string(numbers) + " of " + std::to_string(got->size) +
                                                    " values are numbers, failed: " + std::to_string(failed));
}

void check_running_statistics(const Layer& layer) {
    for (const Parameters& of : layer.parameters)
        for (const ArrayP& running : {of.running_mean, of.running_var}) check_values(running, syncbn::kWrite, false);
}

void Step::check() {
    each([](Replica& replica) {
        const std::string what = " of " + replica.layer.name + " succeeds: ";
        expect(replica.forward.error.empty(), "the forward" + what + replica.forward.error);
        check_values(replica.y, replica.req, false);
        for (const Backward& backward : replica.backwards) {
            expect(backward.outcome.error.empty(), "the backward" + what + backward.outcome.error);
            for (const ArrayP& array : backward.gradients) check_values(array, syncbn::kWrite, false);
        }
    });
}

void right_step(Run& run, Layer& layer) {
    Step step(run, {&layer}, Manner());
    step.issue();
    run.engine.wait_for_all();
    step.check();
    check_running_statistics(layer);
}

}  // namespace driver
