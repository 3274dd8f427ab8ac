#include "custom.h"

#include "figures.h"
#include "memory.h"
#include "mxnet.h"

namespace driver {
namespace {

// CustomOpPropCallbacks and CustomOpCallbacks in MXNet's c_api.h
enum { kDeleteProperty, kArguments, kOutputs, kAuxiliary, kInferShape, kBackwardDependency, kCreate, kInferType };
enum { kDeleteState, kForward, kBackward };

template <typename... Parameters>
void call(const MXCallbackList& list, int which, Parameters... parameters) {
    using Function = int (*)(Parameters..., void*);
    const auto function = reinterpret_cast<Function>(reinterpret_cast<void*>(list.callbacks[which]));
    const auto within = [&] {
        const Within core(true);
        return function(parameters..., list.contexts[which]);
    };
    if (within() == 0) throw dmlc::Error("Check failed");
    const std::string error = take_error();
    if (!error.empty()) throw dmlc::Error(error);
}

void attempt(Outcome& outcome, const std::function<void()>& work) {
    try {
        work();
    } catch (const dmlc::Error& error) {
        ++figures.failures;
        if (outcome.error.empty()) outcome.error = error.what();
    }
    ++outcome.ended;
}

std::vector<void*> handles(const std::vector<ArrayP>& arrays) {
    std::vector<void*> out;
    for (const auto& array : arrays) out.push_back(new_handle(array));
    return out;
}

template <typename T>
void append(std::vector<T>& to, const std::vector<T>& values) {
    to.insert(to.end(), values.begin(), values.end());
}

std::vector<Engine::Variable> variables(const std::vector<ArrayP>& arrays) {
    std::vector<Engine::Variable> out;
    for (const auto& array : arrays)
        if (array) out.push_back(array.get());
    return out;
}

}  // namespace

int64_t Tensor::size() const {
    int64_t out = 1;
    for (int extent : shape) out *= extent;
    return out;
}

Property::Property() { ++figures.properties; }

// MXNet deletes the property whatever fails in here. So does the destructor: the other constructor has ended by then.
Property::Property(const std::map<std::string, std::string>& attributes) : Property() {
    std::vector<const char*> keys, values;
    for (const auto& attribute : attributes) {
        keys.push_back(attribute.first.c_str());
        values.push_back(attribute.second.c_str());
    }
    {
        const Within core(true);
        if (operator_creator()("gluon_syncbn", static_cast<int>(keys.size()), keys.data(), values.data(),
                               &callbacks_) == 0)
            throw dmlc::Error("Check failed");
    }
    inputs = count(kArguments);
    outputs = count(kOutputs);
    auxiliary = count(kAuxiliary);
    std::vector<int> places(outputs + inputs + outputs);
    for (size_t i = 0; i < places.size(); ++i) places[i] = static_cast<int>(i);
    const int *dy = places.data(), *in = dy + outputs, *out = in + inputs;
    int size = 0, *list = nullptr;
    call(callbacks_, kBackwardDependency, dy, in, out, &size, &list);
    needed.assign(list, list + size);
}

Property::~Property() {
    call(callbacks_, kDeleteProperty);
    --figures.properties;
}

size_t Property::count(int which) const {
    char** names = nullptr;
    call(callbacks_, which, &names);
    size_t out = 0;
    while (names[out] != nullptr) ++out;
    return out;
}

std::vector<Tensor> Property::infer(const Tensor& data) const {
    const size_t total = inputs + outputs + auxiliary;
    std::vector<int> types(total, -1), dims(total, 0), shape = data.shape;
    std::vector<int*> shapes(total, shape.data());
    types[0] = static_cast<int>(data.type);
    dims[0] = static_cast<int>(shape.size());
    call(callbacks_, kInferShape, static_cast<int>(total), dims.data(), shapes.data());
    call(callbacks_, kInferType, static_cast<int>(total), types.data());
    std::vector<Tensor> out;
    for (size_t i = 0; i < total; ++i)
        out.push_back({static_cast<Type>(types[i]), std::vector<int>(shapes[i], shapes[i] + dims[i])});
    return out;
}

State::State(const Property& property, const std::string& context, const std::vector<Tensor>& tensors)
    : needed(property.needed) {
    std::vector<Tensor> inputs = tensors;
    const auto first_output = inputs.begin() + static_cast<int>(property.inputs);
    inputs.erase(first_output, first_output + static_cast<int>(property.outputs));
    std::vector<std::vector<unsigned>> extents;
    std::vector<unsigned*> shapes;
    std::vector<int> dims, types;
    for (const Tensor& input : inputs) extents.emplace_back(input.shape.begin(), input.shape.end());
    for (size_t i = 0; i < inputs.size(); ++i) {
        shapes.push_back(extents[i].data());
        dims.push_back(static_cast<int>(extents[i].size()));
        types.push_back(static_cast<int>(inputs[i].type));
    }
    const int *all_dims = dims.data(), *all_types = types.data();
    call(property.callbacks(), kCreate, context.c_str(), static_cast<int>(inputs.size()), shapes.data(), all_dims,
         all_types, &callbacks_);
    ++figures.states;
}

State::~State() {
    call(callbacks_, kDeleteState);
    --figures.states;
}

void Execution::forward(Engine& engine, const std::vector<int>& reqs, bool training, Outcome& outcome) const {
    std::vector<ArrayP> arrays = inputs, written = outputs;
    append(arrays, outputs);
    append(arrays, auxiliary);
    append(written, auxiliary);  // FMutateInputs
    auto writes = variables(written);
    writes.push_back(state.get());
    engine.push(variables(inputs), writes, [arrays, reqs, training, &outcome, state = state] {
        ++figures.forwards;
        auto all = handles(arrays);
        std::vector<int> tags(all.size());
        attempt(outcome, [&] {
            call(state->callbacks(), kForward, static_cast<int>(all.size()), all.data(), tags.data(), reqs.data(),
                 static_cast<int>(training));
        });
    });
}

void Execution::backward(Engine& engine, const std::vector<ArrayP>& of_outputs, const std::vector<ArrayP>& of_inputs,
                         const std::vector<int>& reqs, Outcome& outcome) const {
    std::vector<ArrayP> candidates = of_outputs;
    append(candidates, inputs);
    append(candidates, outputs);
    std::vector<ArrayP> arrays(candidates.size());
    for (int place : state->needed) arrays[place] = candidates[place];
    std::vector<ArrayP> read = arrays;
    append(read, auxiliary);
    append(arrays, of_inputs);
    append(arrays, auxiliary);
    auto writes = variables(of_inputs);
    writes.push_back(state.get());
    engine.push(variables(read), writes, [arrays, reqs, &outcome, state = state] {
        ++figures.backwards;
        auto all = handles(arrays);
        std::vector<int> tags(all.size());
        attempt(outcome, [&] {
            call(state->callbacks(), kBackward, static_cast<int>(all.size()), all.data(), tags.data(), reqs.data(), 1);
        });
    });
}

}  // namespace driver
