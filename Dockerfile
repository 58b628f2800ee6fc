# A pod's image: official torch with compiler and headers, and the packages of ./run.sh setup. The repository and its
# data are on the volume (docs/pods.md). Not built yet.     docker build -t golf .
FROM pytorch/pytorch:2.9.1-cuda12.8-cudnn9-devel
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1
RUN apt-get update && apt-get install -y --no-install-recommends git openssh-server rsync tmux \
    && rm -rf /var/lib/apt/lists/*
COPY requirements.txt requirements-dev.txt /opt/golf/
RUN python3 -m pip install -r /opt/golf/requirements-dev.txt kernels
