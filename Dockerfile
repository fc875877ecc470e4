# lightning_fl on a CPU. Runs are written to the working directory of the host, as its user:
#
#   docker build --tag lightning_fl .
#   docker run --rm --user "$(id -u):$(id -g)" --volume "$PWD:/work" lightning_fl \
#       fit --config digits.yaml
FROM python:3.13-slim AS build
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:3.13-slim
# PyTorch's own index has builds without CUDA, which are smaller by some gigabytes.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    "$(echo /wheels/*.whl)[demo]"
# A user of the host has neither a name nor a home here; torch asks for a name, matplotlib for a home.
ENV USER=federation HOME=/tmp
RUN install --directory --owner=1000 --group=1000 /work
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["lightning-fl"]
CMD ["--help"]
