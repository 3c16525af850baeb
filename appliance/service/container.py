"""Writes the files that build and run the server in Docker."""

from __future__ import annotations

import json
from pathlib import Path

DOCKERFILE = """\
# syntax=docker/dockerfile:1
FROM python:3.12-slim-bookworm
RUN apt-get update \\
    && apt-get install --yes --no-install-recommends gcc libc6-dev \\
    && rm -rf /var/lib/apt/lists/*
COPY . /source
# On a machine without an NVIDIA GPU this index saves gigabytes:
# docker compose build --build-arg EXTRA_INDEX=https://download.pytorch.org/whl/cpu
# With a driver before 580 the one of CUDA 12.6 is needed, which ends in cu126 instead of cpu.
ARG EXTRA_INDEX=
RUN pip install --no-cache-dir ${EXTRA_INDEX:+--extra-index-url "$EXTRA_INDEX"} /source \\
    && useradd --create-home --uid 10001 appliance \\
    && install --directory --owner appliance --mode 0700 /cache
USER appliance
ENV APPLIANCE_CACHE_DIR=/cache HF_HOME=/cache/hub APPLIANCE_HOST=0.0.0.0
VOLUME /cache
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=10m --interval=30s --timeout=5s CMD \\
    ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/health')"]
ENTRYPOINT ["appliance", "serve"]
"""

_COMPOSE = """\
# docker compose up --detach; with an NVIDIA GPU:
# docker compose -f compose.yaml -f compose.gpu.yaml up --detach
services:
  appliance:
    build:
      context: {context}
      dockerfile: {dockerfile}
    command: {command}
    environment:
      APPLIANCE_API_KEY: ${{APPLIANCE_API_KEY:?set it in .env, as APPLIANCE_API_KEY=...}}
    ports:
      - "8080:8080"
    volumes:
      - cache:/cache{mount}
    shm_size: 1gb
    init: true
    read_only: true
    tmpfs:
      - /tmp
    cap_drop: [ALL]
    security_opt: ["no-new-privileges:true"]
    stop_grace_period: {grace:.0f}s
    restart: unless-stopped
volumes:
  cache:
"""

COMPOSE_GPU = """\
# The NVIDIA Container Toolkit has to be installed on the host.
services:
  appliance:
    deploy:
      resources:
        reservations:
          devices:
            - driver: nvidia
              count: all
              capabilities: [gpu]
"""


def container_files(source: Path, folder: Path, model: str, grace_seconds: float) -> dict[str, str]:
    """Return the files by name.

    Args:
        source: the checkout to build the image from.
        model: local path or name of the model; empty means the default.
        grace_seconds: between the request to stop and the kill.
    """
    path, mount = Path(model).expanduser().absolute(), ""
    if model and path.exists():
        model = f"/models/{path.name}"
        mount = f"\n      - {json.dumps(f'{path}:{model}:ro')}"
    compose = _COMPOSE.format(
        context=json.dumps(str(source)),
        dockerfile=json.dumps(str(folder.absolute() / "Dockerfile")),
        command=json.dumps([model] if model else []),
        mount=mount,
        grace=grace_seconds,
    )
    return {"Dockerfile": DOCKERFILE, "compose.yaml": compose, "compose.gpu.yaml": COMPOSE_GPU}
