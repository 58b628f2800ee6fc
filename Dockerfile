# A pod's image: official torch with compiler and headers, and what ./run.sh setup adds to it. The repository and its
# data are on the volume (docs/pods.md). Not built yet.     docker build -t golf .
FROM pytorch/pytorch:2.9.1-cuda12.8-cudnn9-devel
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1
RUN apt-get update && apt-get install -y --no-install-recommends git openssh-server rsync tmux \
    && rm -rf /var/lib/apt/lists/*
COPY run.sh requirements.txt requirements-dev.txt constraints.txt /opt/golf/
RUN cd /opt/golf && ./run.sh setup && python3 -m pip install kernels
