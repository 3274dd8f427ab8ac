#include "replica.h"

#include <algorithm>
#include <limits>

#include "core.h"
#include "figures.h"
#include "mxnet.h"

namespace driver {

using syncbn::kAdd;
using syncbn::kNull;
using syncbn::kWrite;

Replica::Replica(Random& random, Layer& layer, size_t context, int node, bool training, int height, int backwards)
    : layer(layer),
      context(context),
      context_name(layer.placed[context].context),
      node(node),
      training(training),
      samples(random.whole(1, 5)),
      height(height),
      channels(layer.spec.channels),
      parameters(layer.placed[context].parameters),
      // The backward of an activation is about what y is, without what was there before.
      req(layer.spec.activates() ? int{kWrite} : random.one_of<int>({kWrite, kWrite, kWrite, kNull})) {
    fill(random, layer.spec.type, backwards);
}

void Replica::fill(Random& random, Type type, int count) {
    const int64_t size = samples * channels * height;
    const double scale = 1 + random.whole(0, 3), offset = random.whole(-2, 2);
    x = make_array(type, size, 0);
    for (int64_t i = 0; i < size; ++i) x->set(i, offset + scale * random.normal());
    if (layer.spec.adds) {
        addend = make_array(type, size, 0);
        for (int64_t i = 0; i < size; ++i) addend->set(i, random.normal());
    }
    backwards.clear();
    for (int k = 0; k < count; ++k) {
        const auto vector = [&] { return make_array(parameters.gamma->type, channels, kBefore); };
        backwards.push_back(
            {make_array(type, size, 0), make_array(type, size, kBefore), vector(), vector(), {}, {}, {}});
        if (layer.spec.adds) backwards[k].daddend = make_array(type, size, kBefore);
        for (int64_t i = 0; i < size; ++i) backwards[k].dy->set(i, random.normal());
        for (int input = 0; input < 4; ++input)
            backwards[k].reqs.push_back(random.one_of<int>({kWrite, kWrite, kAdd, kNull}));
    }
}

void Replica::become(Random& random, Type type, int new_channels) {
    channels = new_channels;
    const Type parameter = type == Type::kFloat64 ? Type::kFloat64 : Type::kFloat32;
    const auto vector = [&](double value) { return make_array(parameter, channels, value); };
    parameters = {vector(1), vector(0), vector(0), vector(1)};
    fill(random, type, static_cast<int>(backwards.size()));
}

void Replica::issue_forward(Engine& engine) {
    std::vector<int> extents{static_cast<int>(samples), static_cast<int>(channels), static_cast<int>(height)};
    if (layer.spec.channels_last) std::swap(extents[1], extents[2]);
    set_training(training);
    try {
        property_ = layer.property(node);
        const auto tensors = property_->infer({x->type, extents});
        if (!state_)
            state_ = std::make_shared<State>(*property_, context_name, tensors);
        else if (training) {
            const size_t id = static_cast<size_t>(layer.id), number = static_cast<size_t>(node);
            syncbn_begin_graph(context_name.c_str(), {1, &id}, {1, &number}, {0, nullptr}, false);
            syncbn_end_graph({0, nullptr});
        }
        const Tensor& output = tensors[property_->inputs];
        y = make_array(output.type, output.size(), kBefore);
        execution_ = {
            state_, {x, parameters.gamma, parameters.beta}, {y}, {parameters.running_mean, parameters.running_var}};
        if (addend) execution_.inputs.push_back(addend);
        execution_.forward(engine, {req}, training, forward);
    } catch (const dmlc::Error& error) {
        ++figures.failures;
        forward.error = error.what();
        differentiated = false;
    }
    set_training(false);
}

void Replica::issue_backward(Engine& engine, Backward& backward) {
    std::vector<ArrayP> of_inputs{backward.dx, backward.dgamma, backward.dbeta};
    if (addend) of_inputs.push_back(backward.daddend);
    execution_.backward(engine, {backward.dy}, of_inputs, backward.reqs, backward.outcome);
}

void Replica::repeat(Random& random, const Replica& earlier) {
    context = earlier.context;
    context_name = earlier.context_name;
    parameters = earlier.parameters;
    samples = earlier.samples;
    height = earlier.height;
    state_ = earlier.state_;
    fill(random, x->type, static_cast<int>(backwards.size()));
}

void Replica::let_go() {
    property_.reset();
    state_.reset();
    execution_ = {};
}

}  // namespace driver
