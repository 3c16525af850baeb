"""Settings of the API process, and the API keys that they name. Imports nothing heavy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec

from appliance.config.api_keys import ApiKey, check_keys, read_keys
from appliance.config.setting import Group, Setting, Unit, check_all, fields_of
from appliance.config.values import GIB, MIB
from appliance.errors import ConfigError


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the API process; raises ConfigError if a value is out of bounds."""

    host: Annotated[
        str,
        Setting("Address to listen on; 0.0.0.0 lets other machines in, with a key.", Group.ADDRESS),
    ] = "127.0.0.1"
    port: Annotated[
        int, Setting("Port to listen on; 0 takes a free one.", Group.ADDRESS, low=0, high=65535)
    ] = 8080
    api_key: Annotated[
        str | None,
        Setting(
            "The API key without a name, which manages everything; not a flag, since other"
            " users could see it.",
            Group.ADDRESS,
            has_flag=False,
            is_key=True,
        ),
    ] = None
    api_keys: Annotated[
        dict[str, str],
        Setting(
            "More API keys, by the names of their holders.",
            Group.ADDRESS,
            has_flag=False,
        ),
    ] = msgspec.field(default_factory=dict)
    api_key_file: Annotated[
        str | None,
        Setting("File with API keys, a line NAME=KEY for each.", Group.ADDRESS),
    ] = None
    served_model_name: Annotated[
        str | None, Setting("Model id in the API.", Group.MODEL, default_is="the model's own")
    ] = None
    models_memory: Annotated[
        int | None,
        Setting(
            "Memory of all loaded models together, on the GPU or else in RAM; the least recently"
            " used one makes room.",
            Group.MODEL,
            unit=Unit.BYTES,
            low=MIB,
            high=2**50,
            default_is="what is free",
        ),
    ] = None
    max_queue: Annotated[
        int, Setting("Requests that may wait.", Group.REQUESTS, low=0, high=10**6)
    ] = 64
    max_queue_tokens: Annotated[
        int,
        Setting(
            "Prompt tokens that may wait; a single prompt may be longer.",
            Group.REQUESTS,
            unit=Unit.TOKENS,
            low=1,
            high=10**9,
        ),
    ] = 2**20
    max_queue_seconds: Annotated[
        float,
        Setting(
            "Longest time a request may wait to be started.",
            Group.REQUESTS,
            unit=Unit.SECONDS,
            low=0.001,
            high=10 * 86400,
        ),
    ] = 600.0
    drain_timeout: Annotated[
        float,
        Setting(
            "Longest time that answers may continue after the server was told to stop.",
            Group.REQUESTS,
            unit=Unit.SECONDS,
            low=0,
            high=86400,
        ),
    ] = 30.0
    idle_timeout: Annotated[
        float,
        Setting(
            "Time without a request after which the engine's process ends; the next request wakes"
            " it. 0 keeps it.",
            Group.MODEL,
            unit=Unit.SECONDS,
            low=0,
            high=365 * 86400,
        ),
    ] = 0.0
    share_prefixes_between_keys: Annotated[
        bool,
        Setting(
            "Let API keys reuse each other's cached prefixes; timing then tells them of each"
            " other's prompts.",
            Group.ADDRESS,
        ),
    ] = False
    force_include_usage: Annotated[
        bool,
        Setting(
            "End every stream with its token counts, for clients that show them but do not ask.",
            Group.REQUESTS,
        ),
    ] = False
    max_body_bytes: Annotated[
        int,
        Setting("Largest body of a request.", Group.REQUESTS, unit=Unit.BYTES, low=1024, high=GIB),
    ] = 2 * MIB
    allow_image_urls: Annotated[
        str,
        Setting(
            "Hosts from which pictures of messages are fetched, such as example.org or"
            " *.example.org, separated by commas; * allows all, and private addresses only if"
            " named themselves.",
            Group.REQUESTS,
            default_is="none: pictures come in messages",
        ),
    ] = ""
    max_connections: Annotated[
        int,
        Setting("Most connections, all clients together.", Group.ADDRESS, low=8, high=10**5),
    ] = 768
    allowed_origins: Annotated[
        str,
        Setting(
            "Origins of web pages and apps that may call, such as app://obsidian.md, separated"
            " by commas; * allows all.",
            Group.ADDRESS,
            default_is="none",
        ),
    ] = ""
    allowed_hosts: Annotated[
        str,
        Setting(
            "Names that a reverse proxy passes on, such as llm.example, separated by commas;"
            " * allows all.",
            Group.ADDRESS,
            default_is="none",
        ),
    ] = ""
    tls_cert: Annotated[
        str | None,
        Setting(
            "File with a certificate and its chain, in PEM, to speak HTTPS; read again when it"
            " changes.",
            Group.ADDRESS,
        ),
    ] = None
    tls_key: Annotated[
        str | None,
        Setting("File with its private key.", Group.ADDRESS, default_is="the certificate's file"),
    ] = None
    root_path: Annotated[
        str,
        Setting(
            "Path under which a reverse proxy serves the API, such as /llm.",
            Group.ADDRESS,
            default_is="the root",
        ),
    ] = ""
    trusted_proxies: Annotated[
        str,
        Setting(
            "Addresses of reverse proxies whose X-Forwarded-For is trusted, such as 127.0.0.1 or"
            " 10.0.0.0/8, separated by commas.",
            Group.ADDRESS,
            default_is="none",
        ),
    ] = ""
    show_prompts: Annotated[
        bool,
        Setting("Let dashboards show prompts; with several keys, each sees its own.", Group.LOG),
    ] = False
    min_quality: Annotated[
        str | None,
        Setting(
            "Refuse a model whose quality card is worse, or warn: kld<=0.1 (or 0.1 for short),"
            " same-top>=90, ppl-ratio<=1.05, warn:kld<=0.05; separated by commas.",
            Group.MODEL,
        ),
    ] = None
    log_level: Annotated[
        str,
        Setting(
            "Lowest level to log: debug, info, warning or error.",
            Group.LOG,
            choices=("debug", "info", "warning", "error"),
        ),
    ] = "info"
    log_format: Annotated[
        str,
        Setting(
            "Log lines as text, or as json, one object per line.",
            Group.LOG,
            choices=("text", "json"),
        ),
    ] = "text"
    access_log: Annotated[
        bool,
        Setting(
            "Log a line per request: who, what, status and time, never the prompt.",
            Group.LOG,
        ),
    ] = False

    def __post_init__(self) -> None:
        check_all(self)
        check_keys(self.api_key, self.api_keys)
        if self.tls_key and not self.tls_cert:
            raise ConfigError("tls_key needs the certificate whose key it is: set tls_cert")


KEY_VARIABLE = fields_of(ServerConfig)["api_key"].variable


def api_key_from_environment() -> str | None:
    """Return the key that commands send to a server."""
    return os.environ.get(KEY_VARIABLE) or None


def key_file(server: ServerConfig) -> Path | None:
    return None if server.api_key_file is None else Path(server.api_key_file).expanduser()


def known_keys(server: ServerConfig) -> dict[str, ApiKey]:
    """Return a server's keys from settings and key file, by name; empty if it needs none.

    Raises ConfigError if the key file is unreadable or invalid, or repeats a name.
    """
    mine = check_keys(server.api_key, server.api_keys)
    if (path := key_file(server)) is None:
        return mine
    read = read_keys(path)
    if twice := sorted(read.keys() & mine.keys()):
        raise ConfigError(f"{path}: {twice[0]!r} has an API key already, in the settings")
    return check_keys(server.api_key, server.api_keys | read)


def own_key(server: ServerConfig) -> tuple[str | None, dict[str, str]]:
    """Return an administrator's key for a program that starts the server to watch it.

    Returns:
        The key, None if none is needed; and the environment that makes the server accept it. If all
        of several keys have names, or only digests are stored, it is an additional key.
    """
    keys, environment = known_keys(server), dict(os.environ)
    if not keys:
        return None, environment
    secret = next(iter(keys.values())).secret
    if secret is not None and (len(keys) == 1 or server.api_key):
        return secret, environment
    import secrets  # slow to import

    key = secrets.token_urlsafe(24)
    return key, environment | {KEY_VARIABLE: key}
