#include "step.h"

#include "core.h"
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
    for (int node = 0; node < kNodes; ++node) graph_[node] = property(node);
}

std::shared_ptr<Callbacks> Layer::property(int node) const {
    const auto kept = graph_.find(node);
    if (kept != graph_.end()) return kept->second;
    return make_property({{"layer", kProcess + std::to_string(id)},
                          {"node", std::to_string(node)},
                          {"axis", spec.channels_last ? "-1" : "1"},
                          {"eps", "1e-5"},
                          {"momentum", "0.9"},
                          {"fix_gamma", spec.fix_gamma ? "1" : "0"},
                          {"use_global_stats", "0"},
                          {"unbiased", "0"},
                          {"masks", "0"},
                          {"fuses", "0"},
                          {"on_cpus", "1"},
                          {"slope", std::to_string(spec.slope)},
                          {"ceiling", "inf"},
                          {"adds", spec.adds ? "1" : "0"}});
}

void Layer::place(int contexts, const char* misplaced) const {
    replaced_ = contexts != spec.contexts || *misplaced != 0;
    std::vector<std::string> names;
    std::vector<const char*> texts;
    for (int i = 0; i < contexts; ++i) names.push_back(context_name(i));
    for (const std::string& name : names) texts.push_back(name.c_str());
    syncbn_layer_place(id, {contexts, texts.data()}, misplaced);
}

void Layer::set_timeout(double seconds) const {
    syncbn::registry().change(*syncbn::registry().find(id), [&](auto& own) { own.own_timeout = seconds; });
}

void Layer::set_exchange(Asked* const* exchange) const {
    syncbn::registry().change(*syncbn::registry().find(id), [&](auto& own) {
        own.own_exchange = **exchange;
        own.agreed = std::make_shared<const syncbn::Agreed>(syncbn::Agreed{{}, id, name, 0});
        own.agreed_by = own.own_exchange.host.get();
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
void Replica::push(Engine& engine, int callback, std::vector<ArrayP> arrays, std::vector<int> reqs,
                   Outcome& outcome) const {
    arrays.insert(arrays.end(), {parameters.running_mean, parameters.running_var});
    engine.push(parameters.running_mean.get(), [=, &outcome, state = state_, training = training] {
        ++(callback == kForward ? figures.forwards : figures.backwards);
        std::vector<void*> handles;
        for (const ArrayP& array : arrays) handles.push_back(new_handle(array));
        std::vector<int> tags(handles.size());
        try {
            state->call(callback, static_cast<int>(handles.size()), handles.data(), tags.data(), reqs.data(),
                        static_cast<int>(training));
        } catch (const dmlc::Error& error) {
            ++figures.failures;
            outcome.error = error.what();
        }
        outcome.ended = true;
    });
}

void Replica::issue_forward(Engine& engine) {
    inputs_ = {x, parameters.gamma, parameters.beta};
    if (addend) inputs_.push_back(addend);
    set_training(training);
    try {
        property_ = layer.property(node);
        // Of [inputs][output][running statistics]. MXNet knows the data's, and asks for the others.
        std::vector<int> extents{static_cast<int>(samples), static_cast<int>(channels), static_cast<int>(height)};
        if (layer.spec.channels_last) std::swap(extents[1], extents[2]);
        const size_t count = inputs_.size() + 3;
        std::vector<int> types(count, -1), dims(count, 0);
        std::vector<int*> shapes(count, extents.data());
        types[0] = static_cast<int>(x->type);
        dims[0] = 3;
        property_->call(kInferShape, static_cast<int>(count), dims.data(), shapes.data());
        property_->call(kInferType, static_cast<int>(count), types.data());
        expect(dims[1] == 1 && *shapes[1] == channels && types[1] == static_cast<int>(parameters.gamma->type),
               "the shape and type of parameters follow from those of the data");
        std::vector<int> places(1 + inputs_.size() + 1);
        std::iota(places.begin(), places.end(), 0);
        const int *dy = places.data(), *inputs = dy + 1, *outputs = inputs + inputs_.size();
        int size = 0, *needed = nullptr;
        property_->call(kBackwardDependency, dy, inputs, outputs, &size, &needed);
        needed_.assign(needed, needed + size);
        if (!state_) {
            const auto made = std::make_shared<Callbacks>();
            std::vector<std::vector<unsigned>> given;
            std::vector<unsigned*> starts;
            const auto without_output = [&](auto& of) { of.erase(of.begin() + static_cast<int>(inputs_.size())); };
            for (size_t i = 0; i < count; ++i) given.emplace_back(shapes[i], shapes[i] + dims[i]);
            for (auto& shape : given) starts.push_back(shape.data());
            for (auto* of : {&dims, &types}) without_output(*of);
            without_output(starts);
            const int *all_dims = dims.data(), *all_types = types.data();
            property_->call(kCreate, context.c_str(), static_cast<int>(starts.size()), starts.data(), all_dims,
                            all_types, &made->list);
            state_ = made;
        } else if (training) {
            const size_t id = static_cast<size_t>(layer.id), number = static_cast<size_t>(node);
            syncbn_begin_graph(context.c_str(), {1, &id}, {1, &number}, {0, nullptr}, false);
            syncbn_end_graph({0, nullptr});
        }
        y = make_array(x->type, x->size, kBefore);
        std::vector<ArrayP> arrays = inputs_;
        arrays.push_back(y);
        push(engine, kForward, arrays, {req}, forward);
    } catch (const dmlc::Error& error) {
        ++figures.failures;
        forward.error = error.what();
        differentiated = false;
    }
    set_training(false);
}

void Replica::issue_backward(Engine& engine, Backward& backward) {
    std::vector<ArrayP> given{backward.dy};
    given.insert(given.end(), inputs_.begin(), inputs_.end());
    given.push_back(y);
    std::vector<ArrayP> arrays(given.size());
    for (int place : needed_) arrays[place] = given[place];
    arrays.insert(arrays.end(), backward.gradients.begin(), backward.gradients.end());
    push(engine, kBackward, arrays, backward.reqs, backward.outcome);
}

void Replica::repeat(Random& random, const Replica& earlier) {
    context = earlier.context;
    parameters = earlier.parameters;
    samples = earlier.samples;
    height = earlier.height;
    state_ = earlier.state_;
    fill(random, x->type, backwards.size());
}

void Replica::let_go() {
    property_.reset();
    state_.reset();
    inputs_.clear();
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
