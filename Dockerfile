# gluon_syncbn with MXNet for NVIDIA GPUs of compute capability 5.0 to 8.9, and GluonCV:
#     docker build -t gluon_syncbn .
#     docker run --rm --gpus all gluon_syncbn                        # the self-check
#     docker run --rm --gpus all -v "$PWD:/job" -w /job gluon_syncbn python train.py
# The host has NVIDIA's driver, 520 or later, and its container toolkit (docs/platforms.md). Without a GPU:
#     docker build --build-arg MXNET=cpu -t gluon_syncbn .

FROM debian:bookworm-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-venv
WORKDIR /source
COPY . .
RUN python3 -m venv /build && /build/bin/pip wheel --no-deps --wheel-dir /wheels .

FROM debian:bookworm-slim
# What packages of Python do not bring. libgomp1, libquadmath0: MXNet; zlib1g: cuDNN.
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv libgomp1 libquadmath0 zlib1g \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
ARG MXNET=cu112
RUN python3 -m venv /opt/venv && /opt/venv/bin/pip install --no-cache-dir "$(ls /wheels/*.whl)[$MXNET,gluoncv,mpi]"
ENV PATH=/opt/venv/bin:$PATH
CMD ["gluon-syncbn", "check"]
