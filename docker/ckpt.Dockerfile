# Checkpoints: convert, inspect, verify, compare. Build in the root of the repository: docker build -f docker/ckpt.Dockerfile -t mega-ckpt .
# torch is its CPU build, a sixth of the size of the one with CUDA, which conversion does not use; for another build:
#   --build-arg TORCH_INDEX=<index of wheels>
FROM python:3.11.14-slim-bookworm
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

WORKDIR /src
COPY constraints.txt ./
COPY packages/common packages/common
COPY packages/ckpt packages/ckpt
COPY cli cli
RUN python3 -m venv /opt/mega \
    && /opt/mega/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)" \
    && /opt/mega/bin/pip install --no-cache-dir -c constraints.txt \
        ./packages/common "./packages/ckpt[gguf]" ./cli \
    && useradd --create-home --uid 10001 mega \
    && install -d -o mega -g mega /workspace

ENV PATH=/opt/mega/bin:$PATH
USER 10001
WORKDIR /workspace
ENTRYPOINT ["mega"]
CMD ["--help"]
