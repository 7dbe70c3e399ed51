"""Configuration of the cache service: one TOML file, environment, flags; later ones win.

Validated at start; an error names the key. Environment variables are `KVPLANE_CACHE_` and the key in capitals.
"""

import os
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from kvplane.wire.addresses import cache_address, is_loopback, runtime_directory, socket_path, split
from kvplane.wire.limits import PROMPT_TOKENS

CONFIG_VARIABLE = "KVPLANE_CACHE_CONFIG"
"""Environment variable with the path of the TOML file."""


def _readable(path: Path | None) -> Path | None:
    if path is not None:
        try:
            path.open("rb").close()
        except OSError as error:
            raise ValueError(f"cannot be read: {error}") from error
    return path


ReadablePath = Annotated[Path | None, AfterValidator(_readable)]
"""A file that can be read when the service starts."""


class CacheConfig(BaseSettings):
    """The cache service's settings."""

    model_config = SettingsConfigDict(env_prefix="KVPLANE_CACHE_", extra="forbid", frozen=True, cli_kebab_case=True)
    toml_file: ClassVar[Path | None] = None

    listen: Annotated[list[str], NoDecode, BeforeValidator(split)] = Field(
        default_factory=lambda: [cache_address()],
        description="addresses to listen on: unix:/path, or host:port",
    )
    tls_certificate: ReadablePath = Field(default=None, description="PEM certificate of this server, for TCP")
    tls_key: ReadablePath = Field(default=None, description="PEM key of this server")
    tls_client_ca: ReadablePath = Field(
        default=None, description="PEM authorities whose clients are accepted (mutual TLS)"
    )
    insecure: bool = Field(default=False, description="allow TCP without TLS beyond loopback")
    metrics_address: str = Field(
        default="127.0.0.1:9464",
        pattern=r"^(|[^\s:]+:\d{1,5})$",
        description="host:port of the Prometheus endpoint; empty: none",
    )
    log_format: Literal["auto", "json", "console"] = Field(default="auto", description="auto: console on a terminal")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    reflection: bool = Field(default=True, description="serve the protos by reflection")

    max_pools: int = Field(default=64, ge=1, le=4096, description="pools")
    max_sessions: int = Field(default=1024, ge=1, le=65_536, description="open sessions")
    max_sequences: int = Field(default=4096, ge=1, le=1 << 20, description="sequences of one session at the same time")
    max_prompt_tokens: int = Field(default=PROMPT_TOKENS, ge=1, le=1 << 30, description="tokens of one sequence")
    max_namespaces: int = Field(default=1024, ge=1, le=1 << 20, description="namespaces of one pool")
    prefix_caching: bool = True
    watermark: float = Field(default=0.02, ge=0, lt=1, description="share of a pool that an admission leaves free")
    seal_interval_seconds: float = Field(
        default=0.005, ge=0, le=1, description="least time between two batches of seals"
    )
    shard_ttl_seconds: float = Field(default=10.0, ge=1, le=300, description="silence after which a shard is lost")
    drain_seconds: float = Field(default=5.0, ge=0, le=300, description="time that running calls get at shutdown")
    key_file: Path | None = Field(
        default=None,
        description="file with the secret behind resume tokens and grants, made on the first start; default: cache.key "
        "beside the first Unix socket, or in the runtime directory",
    )
    tenant_secret: ReadablePath = Field(
        default=None, description="file whose bytes the tenants' salts are derived from"
    )

    @property
    def key_path(self) -> Path:
        """Where the key file is."""
        sockets = [path for path in map(socket_path, self.listen) if path is not None]
        return self.key_file or (sockets[0].parent if sockets else runtime_directory()) / "cache.key"

    @model_validator(mode="after")
    def _check_transport(self) -> "CacheConfig":
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        for address in self.listen:
            if socket_path(address) is None and not self.insecure and self.tls_client_ca is None:
                raise ValueError(
                    f"listen: {address} is TCP, which needs mutual TLS (tls_certificate, tls_key, tls_client_ca) "
                    f"or insecure{' (loopback too)' if is_loopback(address) else ''}"
                )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the name is the library's
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the name is the library's
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments first, then environment, then the TOML file."""
        path = os.environ.get(CONFIG_VARIABLE)
        if path and not Path(path).is_file():
            raise FileNotFoundError(f"{CONFIG_VARIABLE}: there is no file {path}")
        toml = (TomlConfigSettingsSource(settings_cls, Path(path)),) if path else ()
        return (init_settings, env_settings, *toml)


def load(arguments: list[str] | None = None) -> CacheConfig:
    """Settings from file, environment and `arguments` (flags). Raises `pydantic.ValidationError` that names the key."""
    source: CliSettingsSource[CacheConfig] = CliSettingsSource(
        CacheConfig, cli_prog_name="kvplane-cache", cli_parse_args=arguments if arguments is not None else []
    )
    return CacheConfig(**source())
