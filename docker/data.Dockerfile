# Text to tokens. No torch in here. Build in the root of the repository: docker build -f docker/data.Dockerfile -t mega-data .
FROM python:3.11.14-slim-bookworm

WORKDIR /src
COPY constraints.txt ./
COPY packages/common packages/common
COPY packages/data packages/data
COPY cli cli
RUN python3 -m venv /opt/mega \
    && /opt/mega/bin/pip install --no-cache-dir -c constraints.txt \
        ./packages/common "./packages/data[all]" ./cli \
    && useradd --create-home --uid 10001 mega \
    && install -d -o mega -g mega /workspace

ENV PATH=/opt/mega/bin:$PATH
USER 10001
WORKDIR /workspace
ENTRYPOINT ["mega"]
CMD ["--help"]
