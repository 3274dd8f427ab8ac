#include "layer.h"

#include "core.h"
#include "exchange.h"
#include "meeting/registry.h"

namespace driver {

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

Layer::Layer(Random& random, const Spec& spec, const std::string& name)
    : spec(spec),
      name(name),
      id(syncbn_layer_create(name.c_str(), static_cast<int>(spec.mode), spec.virtual_devices, spec.group, {}, 0,
                             spec.exchange != nullptr ? *spec.exchange : nullptr)),
      token_(kProcess + std::to_string(id)) {
    if (syncbn::sharing_of({spec.mode, spec.virtual_devices, spec.group, {}}) == syncbn::Sharing::kEach) gathers(id);
    const auto vector = [&](double value) { return make_array(spec.parameter_type(), spec.channels, value); };
    for (int i = 0; i < spec.contexts; ++i) {
        placed.push_back({"cpu(" + std::to_string(i) + ")", {vector(1), vector(0), vector(0), vector(1)}});
        for (int c = 0; c < spec.channels; ++c) {
            placed[i].parameters.gamma->set(c, 0.5 + random.whole(0, 8) / 8.0);
            placed[i].parameters.beta->set(c, random.whole(-4, 4) / 8.0);
        }
    }
    if (spec.exchange != nullptr) set_exchange(spec.exchange);
    place(spec.contexts);
    for (int node = 0; node < kNodes; ++node) graph_[node] = property(node);
}

std::shared_ptr<Property> Layer::property(int node) const {
    const auto kept = graph_.find(node);
    if (kept != graph_.end()) return kept->second;
    return std::make_shared<Property>(std::map<std::string, std::string>{
        {"layer", token_},
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
        {"adds", spec.adds ? "1" : "0"},
    });
}

void Layer::place(int contexts, const char* misplaced) const {
    replaced_ = contexts != spec.contexts || *misplaced != 0;
    std::vector<const char*> names;
    for (int i = 0; i < contexts; ++i) names.push_back(placed[i].context.c_str());
    syncbn_layer_place(id, {contexts, names.data()}, misplaced);
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

void Layer::restore() {
    if (replaced_) place(spec.contexts);
    renew_exchanges();
    // Also where the layer had none of its own: it may have been given one that is broken by now.
    set_exchange(spec.exchange != nullptr ? spec.exchange : exchange_in_memory());
    set_timeout(0);
    syncbn_seed(kSeed);
}

}  // namespace driver
