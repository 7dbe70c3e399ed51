"""Configuration of a compute service: one TOML file, environment, flags; the later in this list wins.

Validated at start; an error names the key. Environment variables are `KVPLANE_COMPUTE_` and the key in capitals.
"""

import os
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from kvplane.wire.addresses import cache_address, runtime_directory, socket_path, split
from kvplane.wire.limits import NAME_BYTES, TTL_MS_MAX

CONFIG_VARIABLE = "KVPLANE_COMPUTE_CONFIG"
"""Environment variable with the path of the TOML file."""


class ComputeConfig(BaseSettings):
    """The compute service's settings."""

    model_config = SettingsConfigDict(env_prefix="KVPLANE_COMPUTE_", extra="forbid", frozen=True, cli_kebab_case=True)
    toml_file: ClassVar[Path | None] = None

    # Where it is
    listen: Annotated[list[str], NoDecode, BeforeValidator(split)] = Field(
        default_factory=lambda: [f"unix:{runtime_directory() / 'compute.sock'}"],
        description="addresses to listen on: unix:/path, or host:port",
    )
    advertise: str = Field("", description="address that engines are told; empty: the first of listen")
    cache: str = Field(default_factory=cache_address, description="address of the cache service")
    attach_socket: Path = Field(
        default_factory=lambda: runtime_directory() / "attach.sock",
        description="Unix socket on which memory is handed to engines",
    )
    memory_folder: Path = Field(
        default_factory=lambda: Path(f"/dev/shm/kvplane-{os.getuid()}"),
        description="folder for shared memory; a restart finds the pool again in it",
    )
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda|cuda:\d{1,3})$", description="cpu, cuda:N, or auto: cuda:0 if it can be used"
    )
    tls_certificate: Path | None = Field(None, description="PEM certificate of this service, for TCP")
    tls_key: Path | None = Field(None, description="PEM key of this service")
    tls_client_ca: Path | None = Field(None, description="PEM authorities whose clients are accepted (mutual TLS)")
    cache_tls_ca: Path | None = Field(None, description="PEM authorities of the cache service; set: TLS towards it")
    insecure: bool = Field(False, description="allow TCP without mutual TLS")
    metrics_address: str = Field("127.0.0.1:9465", description="host:port of the Prometheus endpoint; empty: none")
    log_format: Literal["auto", "json", "console"] = Field("auto", description="auto: console on a terminal")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    reflection: bool = Field(True, description="serve the protos by reflection")

    # What it holds
    pool_id: str = Field("default", min_length=1, max_length=NAME_BYTES, description="pool to join")
    weights_revision: str = Field(max_length=NAME_BYTES, description="revision of the model's weights")
    tokenizer_revision: str = Field("", max_length=NAME_BYTES)
    kv_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    num_layers: int = Field(ge=1, le=4096)
    num_kv_heads: int = Field(ge=1, le=4096)
    head_dim: int = Field(ge=16, le=256, multiple_of=16)
    block_tokens: int = Field(16, ge=1, le=256, description="tokens per block, a power of two")
    window_tokens: int | None = Field(None, ge=1, description="sliding window; absent: full attention")
    head_layout: Literal["NHD", "HND"] = "HND"
    interleaved_kv: bool = False
    pool_bytes: int | None = Field(None, ge=1, description="bytes of block tensors; absent: pool_share decides")
    pool_share: float = Field(0.8, gt=0, le=1, description="part of the memory that is free when the service starts")
    max_blocks: int | None = Field(None, ge=2, lt=1 << 31, description="blocks; absent: what pool_bytes has room for")

    # Which part of it
    rank: int = Field(0, ge=0, le=255)
    tensor_parallel: int = Field(1, ge=1, le=256)
    pipeline_parallel: int = Field(1, ge=1, le=256)

    # Limits
    arena_bytes: int = Field(1 << 30, ge=0, description="bytes of all tensor arenas together")
    queue_capacity: int = Field(256, ge=1, le=65_536, description="jobs that wait for the device thread")
    ttl_seconds: float = Field(
        300.0, ge=1, le=TTL_MS_MAX / 1000, description="time it serves without the cache service"
    )
    drain_seconds: float = Field(5.0, ge=0, le=300, description="time that running calls get at shutdown")
    threads: int | None = Field(None, ge=1, description="threads of the kernels; absent: one per CPU")

    @model_validator(mode="after")
    def _check(self) -> "ComputeConfig":
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        for address in self.listen:
            if socket_path(address) is None and not self.insecure and self.tls_client_ca is None:
                raise ValueError(
                    f"listen: {address} is TCP, which needs mutual TLS (tls_certificate, tls_key, tls_client_ca) "
                    "or insecure"
                )
        if self.block_tokens & (self.block_tokens - 1):
            raise ValueError(f"block_tokens: {self.block_tokens} is no power of two")
        world = self.tensor_parallel * self.pipeline_parallel
        if self.rank >= world:
            raise ValueError(f"rank: {self.rank} is not below tensor_parallel x pipeline_parallel = {world}")
        larger, smaller = max(self.num_kv_heads, self.tensor_parallel), min(self.num_kv_heads, self.tensor_parallel)
        if larger % smaller:
            raise ValueError(f"tensor_parallel: {self.tensor_parallel} does not split {self.num_kv_heads} KV heads")
        if self.pipeline_parallel > self.num_layers:
            raise ValueError(f"pipeline_parallel: {self.pipeline_parallel} stages for {self.num_layers} layers")
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
        toml = (TomlConfigSettingsSource(settings_cls, Path(path)),) if path else ()
        return (init_settings, env_settings, *toml)


def load(arguments: list[str] | None = None) -> ComputeConfig:
    """Settings from file, environment and `arguments` (flags). Raises `pydantic.ValidationError` that names the key."""
    source: CliSettingsSource[ComputeConfig] = CliSettingsSource(
        ComputeConfig, cli_prog_name="kvplane-compute", cli_parse_args=arguments if arguments is not None else []
    )
    return ComputeConfig(**source())
