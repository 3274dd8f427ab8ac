#include "replica.h"

#include <algorithm>
#include <limits>

#include "figures.h"
#include "mxnet.h"

namespace driver {

using syncbn::kAdd;
using syncbn::kNull;
using syncbn::kWrite;

constexpr double kNothing = std::numeric_limits<double>::quiet_NaN();  // nobody has written it

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
      // The backward of an activation, or in place, is about what y is, without what was there before.
      req(layer.spec.activates() || layer.spec.inplace ? int{kWrite}
                                                       : random.one_of<int>({kWrite, kWrite, kWrite, kAdd, kNull})) {
    fill(random, layer.spec.type, backwards);
}

int64_t Replica::at(int64_t sample, int64_t position, int64_t channel) const {
    return layer.spec.channels_last ? (sample * height + position) * channels + channel
                                    : (sample * channels + channel) * height + position;
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
            {make_array(type, size, 0), make_array(type, size, kBefore), vector(), vector(), {}, {}, {}, {}});
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

// op.py puts the operators together; an eager call of two has the second beside the way of the data.
void Replica::issue_forward(Engine& engine) {
    const bool whole = layer.spec.whole();
    const auto roles = whole ? std::vector<Role>{Role::kWhole} : std::vector<Role>{Role::kMeet, Role::kTrack};
    std::vector<int> extents{static_cast<int>(samples), static_cast<int>(channels), static_cast<int>(height)};
    if (layer.spec.channels_last) std::swap(extents[1], extents[2]);
    std::vector<ArrayP> data{x};  // and the batch's statistics and the addend, from one operator to the next
    set_training(training);
    try {
        for (size_t i = 0; i < roles.size(); ++i) {
            const auto property = layer.property(node, roles[i]);
            const auto tensors = property->infer({x->type, extents});
            if (states_.size() == i) states_.push_back(std::make_shared<State>(*property, context_name, tensors));
            Execution execution{states_[i], {data[0], parameters.gamma, parameters.beta}, {}, {}};
            if (addend && i == 0) execution.inputs.push_back(addend);
            if (data.size() == 3) execution.inputs.push_back(data[2]);
            if (i == 1) execution.inputs.push_back(data[1]);
            if (property->auxiliary == 2) execution.auxiliary = {parameters.running_mean, parameters.running_var};
            data.clear();
            for (size_t k = 0; k < property->outputs; ++k) {
                const Tensor& output = tensors[property->inputs + k];
                data.push_back(make_array(output.type, output.size(), k == 0 ? kBefore : kNothing));
            }
            execution.outputs = data;
            const bool is_y = node == kEager ? i == 0 : i + 1 == roles.size();
            if (is_y) y = data[0];
            const bool is_aside = node == kEager && i == 1;
            execution.forward(engine, {is_y ? req : kWrite, kWrite, kWrite}, training, is_aside ? aside : forward);
            executions_.push_back(execution);
            properties_.push_back(property);
        }
    } catch (const dmlc::Error& error) {
        ++figures.failures;
        forward.error = error.what();
        differentiated = false;
    }
    set_training(false);
}

void Replica::issue_backward(Engine& engine, Backward& backward) {
    const size_t way = node == kEager ? 1 : executions_.size();
    ArrayP dy = backward.dy, handed_on;  // the gradient of the addend that the first operator passes to the second one
    for (size_t i = way; i-- > 0;) {
        const Execution& execution = executions_[i];
        const auto vector = [&] { return make_array(parameters.gamma->type, channels, kBefore); };
        std::vector<int> reqs(5, kWrite);
        std::vector<ArrayP> of_inputs{i == 0 ? backward.dx : make_array(dy->type, dy->size, kBefore)};
        if (i == 0) reqs[syncbn::kX] = backward.reqs[syncbn::kX];
        if (i == (training ? 0 : way - 1)) {  // this operator normalises, another one passes the data on
            of_inputs.insert(of_inputs.end(), {backward.dgamma, backward.dbeta});
            std::copy_n(&backward.reqs[syncbn::kGamma], 2, &reqs[syncbn::kGamma]);
        } else {
            of_inputs.insert(of_inputs.end(), {vector(), vector()});
            backward.nothing.insert(backward.nothing.end(), of_inputs.end() - 2, of_inputs.end());
        }
        std::vector<ArrayP> of_outputs(execution.outputs.size());
        of_outputs[0] = dy;
        if (of_outputs.size() == 3) of_outputs[2] = handed_on;
        if (addend && i == 0) {
            of_inputs.push_back(backward.daddend);
            reqs[syncbn::kAddend] = backward.reqs[syncbn::kAddend];
        } else if (addend) {
            handed_on = make_array(dy->type, dy->size, kBefore);
            of_inputs.push_back(handed_on);
        }
        if (i == 1) {
            of_inputs.push_back(make_array(Type::kFloat64, 1 + 2 * channels, kBefore));
            backward.nothing.push_back(of_inputs.back());
        }
        execution.backward(engine, of_outputs, of_inputs, reqs, backward.outcome);
        dy = of_inputs[0];
    }
}

void Replica::repeat(Random& random, const Replica& earlier) {
    context = earlier.context;
    context_name = earlier.context_name;
    parameters = earlier.parameters;
    samples = earlier.samples;
    height = earlier.height;
    states_ = earlier.states_;
    fill(random, x->type, static_cast<int>(backwards.size()));
}

void Replica::let_go() {
    properties_.clear();
    states_.clear();
    executions_.clear();
}

}  // namespace driver
