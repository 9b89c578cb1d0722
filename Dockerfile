# For the CPU, or with --build-arg ACCELERATOR=cuda13 (or cuda12) for NVIDIA GPUs: the wheels bring
# CUDA along, the host its driver and the NVIDIA container toolkit.
#   docker build --tag podracers .
#   docker run --init --rm --volume "$PWD/runs:/podracers/runs" podracers
FROM python:3.11-slim-bookworm

ARG ACCELERATOR=cpu

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

RUN case "$ACCELERATOR" in \
      cpu | cuda12 | cuda13) ;; \
      *) echo "ACCELERATOR: expected cpu, cuda12 or cuda13, got '$ACCELERATOR'" >&2; exit 2 ;; \
    esac

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /podracers

# What the installation reads, and nothing that changes daily: this layer takes minutes.
COPY Makefile setup.cfg pyproject.toml requirements.txt README.md LICENSE ./
COPY podracers/__init__.py podracers/
COPY agents/__init__.py agents/
COPY environments/__init__.py environments/
ENV PIP_NO_CACHE_DIR=1
RUN make EXTRAS="${ACCELERATOR#cpu}" install

# With .git: a run notes its commit.
COPY . .
RUN git config --system --add safe.directory /podracers && make EXTRAS="${ACCELERATOR#cpu}" install

# Compiled programs outlive the container where runs/ is a volume.
ENV XDG_CACHE_HOME=/podracers/runs/.cache \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# Python is the process that hears `docker stop`: it saves a checkpoint, for which it needs --time.
ENTRYPOINT [".venv/bin/python"]
CMD ["scripts/train.py", "--gin_file", "gin/experiments/snake_ppo.gin", \
     "--run_dir", "runs/snake_ppo", "--resume_if_begun"]
