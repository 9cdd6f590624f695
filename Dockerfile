# An island in a container: trains a member, prepares, samples.
#   docker build -t ddm_lightning .
#   docker run --init --gpus all --ipc=host -v "$PWD/runs:/app/runs" ddm_lightning \
#       fit -c experiments/emoji_4x.yaml remote=s3://bucket/emoji_4x member=expert-3
# --init passes signals on and reaps children; --ipc=host, as 64 MB of shared memory are too few for several members.
FROM python:3.12-slim

# torch.compile calls a C compiler on a GPU and a C++ compiler on a CPU.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
ARG EXTRAS=demo,latents
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt --editable ".[${EXTRAS}]"

ENTRYPOINT ["python", "-m", "ddm_lightning"]
CMD ["--help"]
