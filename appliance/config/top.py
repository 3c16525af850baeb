"""Settings of the dashboard. Imports nothing heavy."""

from __future__ import annotations

from typing import Annotated

import msgspec

from appliance.config.setting import Group, Setting, check_all


class TopConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the dashboard; raises ConfigError if a value is out of bounds."""

    url: Annotated[
        str | None,
        Setting(
            "The server to watch; from other servers, their metrics.",
            Group.TOP,
            default_is="the configured server",
        ),
    ] = None
    ca_file: Annotated[
        str | None,
        Setting(
            "PEM file with the certificate to trust over HTTPS: the server's, or its signer's.",
            Group.TOP,
            default_is="those Python trusts",
        ),
    ] = None
    colors: Annotated[
        str,
        Setting(
            "auto, truecolor, 256, 16 or none.",
            Group.TOP,
            choices=("auto", "truecolor", "256", "16", "none"),
        ),
    ] = "auto"
    theme: Annotated[
        str, Setting("dark, black or light.", Group.TOP, choices=("dark", "black", "light"))
    ] = "dark"
    web_host: Annotated[str, Setting("With --web, the address for browsers.", Group.TOP)] = (
        "127.0.0.1"
    )
    web_port: Annotated[
        int, Setting("With --web, the port for browsers.", Group.TOP, low=0, high=65535)
    ] = 8081

    def __post_init__(self) -> None:
        check_all(self)
