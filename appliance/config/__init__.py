"""Settings from flags, environment and TOML, read once into frozen structs.

Add a setting to the struct of its section: `engine`, `server` or `top`. Only this package reads
environment variables; it imports nothing heavy.
"""

from appliance.config.address import authority_to_trust, local_url, network_url, server_to_watch
from appliance.config.engine import SELF_DRAFT, EngineConfig
from appliance.config.environment import (
    ServiceSocket,
    cache_dir,
    config_path,
    jobs_dir,
    kv_dir,
    packed_dir,
    service_socket,
    tuning_dir,
)
from appliance.config.server import (
    ServerConfig,
    api_key_from_environment,
    key_file,
    known_keys,
    own_key,
)
from appliance.config.sources import (
    SECTIONS,
    ModelConfig,
    Settings,
    check_names,
    load_section,
    load_settings,
    unknown_variables,
    warn_of_unknown_variables,
    with_cache_folders,
    written_settings,
)
from appliance.config.top import TopConfig
from appliance.config.values import parse_duration, parse_size

__all__ = [
    "SECTIONS",
    "SELF_DRAFT",
    "EngineConfig",
    "ModelConfig",
    "ServerConfig",
    "ServiceSocket",
    "Settings",
    "TopConfig",
    "api_key_from_environment",
    "authority_to_trust",
    "cache_dir",
    "check_names",
    "config_path",
    "jobs_dir",
    "key_file",
    "known_keys",
    "kv_dir",
    "load_section",
    "load_settings",
    "local_url",
    "network_url",
    "own_key",
    "packed_dir",
    "parse_duration",
    "parse_size",
    "server_to_watch",
    "service_socket",
    "tuning_dir",
    "unknown_variables",
    "warn_of_unknown_variables",
    "with_cache_folders",
    "written_settings",
]
