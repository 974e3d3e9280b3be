# Stock SGLang for a CPU with eagle-plugin. In the repository's folder:
#   docker build -f docker/sglang.Dockerfile -t eagle-plugin-sglang .
# docker/README.md says how to run it.
FROM python:3.11-slim-bookworm AS base
# The compiler builds the kernels of compat/sglang-cpu at the first start, for the CPU that it then runs on. Any version
# that Debian has will do.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*

FROM base AS build
WORKDIR /source
COPY . .
# The lock has every package of the engine; the wheels come last and change none of them. `eagle-plugin demo` fetches its
# model with pip.
RUN EAGLE_BUILD=cpu environments/make.sh wheels /wheels . examples/heads compat/sglang-cpu \
    && environments/make.sh packages /opt/engine environments/sglang/requirements.lock \
    && .venv-tools/bin/uv pip install --python /opt/engine/bin/python --no-deps /wheels/*.whl \
    && /opt/engine/bin/python -m ensurepip

FROM base
COPY --from=build /opt/engine /opt/engine
# /cache: a volume that is mounted there belongs to the user too.
RUN useradd --create-home --uid 1000 eagle && install -d -o eagle -g eagle /cache
USER 1000
WORKDIR /home/eagle
ENV PATH=/opt/engine/bin:$PATH SGLANG_USE_CPU_ENGINE=1
EXPOSE 30000
# A container has an address of its own, so the server listens on all of them; publish the port on 127.0.0.1.
ENTRYPOINT ["python", "-m", "sglang.launch_server", "--device", "cpu", "--host", "0.0.0.0", "--port", "30000"]
