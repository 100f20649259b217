# Evaluation, generation and the server. Build in the root of the repository: docker build -f docker/eval.Dockerfile -t mega-eval .
# BASE is any image with Python 3.11 or later and its venv module. The default suits CPUs, and GPUs too: torch's wheels
# bring CUDA along, so that the machine has to offer no more than its driver. For an image that has a torch of its own:
#   --build-arg BASE=<cuda image> --build-arg CONSTRAINTS=/dev/null
ARG BASE=python:3.11.14-slim-bookworm
FROM ${BASE}
ARG CONSTRAINTS=constraints.txt

# torch.compile and Triton build their kernels with a C compiler at run time.
# hadolint ignore=DL3008
RUN command -v g++ >/dev/null || { apt-get update && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*; }

WORKDIR /src
COPY constraints.txt ./
COPY packages/common packages/common
COPY packages/data packages/data
COPY packages/ckpt packages/ckpt
COPY packages/trainer packages/trainer
COPY packages/eval packages/eval
COPY cli cli
RUN python3 -m venv --system-site-packages /opt/mega \
    && /opt/mega/bin/pip install --no-cache-dir -c "$CONSTRAINTS" \
        ./packages/common ./packages/data ./packages/ckpt ./packages/trainer "./packages/eval[all]" ./cli \
    && useradd --create-home --uid 10001 mega \
    && install -d -o mega -g mega /workspace

ENV PATH=/opt/mega/bin:$PATH
USER 10001
WORKDIR /workspace
ENTRYPOINT ["mega"]
CMD ["--help"]
