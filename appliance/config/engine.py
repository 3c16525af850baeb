"""Settings of the engine process. Imports nothing heavy."""

from __future__ import annotations

from typing import Annotated

import msgspec

from appliance.config.setting import Group, Setting, Unit, check_all
from appliance.config.values import GIB, MIB, named_paths
from appliance.errors import ConfigError

MOST_BYTES = 2**50
SELF_DRAFT = "self"  # the served model drafts for itself, at fewer bits


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the engine process; raises ConfigError if a value is out of bounds."""

    replicas: Annotated[
        int,
        Setting(
            "Engine processes that each serve the whole model behind one port. On a CPU they divide"
            " the threads and the free memory; on GPUs each has one. All other settings, such as"
            " kv_cache_memory and max_num_seqs, apply to each replica.",
            Group.COMPUTE,
            low=1,
            high=64,
        ),
    ] = 1
    ranks: Annotated[
        int,
        Setting(
            "Processes that divide the model. Each has a share of every layer, as with"
            " tensor_parallel, or whole layers, as with pipeline_parallel: these where the"
            " link that is measured at the start is slow.",
            Group.COMPUTE,
            low=1,
            high=64,
        ),
    ] = 1
    tensor_parallel: Annotated[
        int,
        Setting(
            "Processes that divide each layer among them. A slow link gives each whole layers"
            " instead.",
            Group.COMPUTE,
            low=1,
            high=64,
        ),
    ] = 1
    pipeline_parallel: Annotated[
        int,
        Setting(
            "Processes that each have a run of whole layers, through which the rows of a step go in"
            " micro-batches.",
            Group.COMPUTE,
            low=1,
            high=64,
        ),
    ] = 1
    gpu_split: Annotated[
        str,
        Setting(
            "Share of the model for each process, such as 2:1; auto divides evenly, unless other"
            " shares are clearly faster by what each process reads per second.",
            Group.COMPUTE,
        ),
    ] = "auto"
    lora: Annotated[
        str,
        Setting(
            "Adapters to load, NAME=PATH, separated by commas; requests name one as their model.",
            Group.MODEL,
            default_is="none",
        ),
    ] = ""
    lora_dir: Annotated[
        str | None,
        Setting(
            "Folder of adapters, each loaded when a request names it as its model.",
            Group.MODEL,
        ),
    ] = None
    max_loras: Annotated[
        int, Setting("Adapters in memory, which one step may mix.", Group.MODEL, low=1, high=1024)
    ] = 8
    max_lora_rank: Annotated[
        int, Setting("Largest rank of an adapter.", Group.MODEL, low=1, high=512)
    ] = 32
    model: Annotated[
        str,
        Setting(
            "Folder, .gguf file or hub id, as MODEL.",
            Group.MODEL,
            default_is="the packaged model",
        ),
    ] = ""
    device: Annotated[
        str,
        Setting(
            "Device: auto, cpu or cuda; auto is a GPU that the kernels support, if one is here.",
            Group.COMPUTE,
            choices=("auto", "cpu", "cuda"),
        ),
    ] = "auto"
    dtype: Annotated[
        str,
        Setting(
            "Type of activations: auto, bfloat16, float16 or float32.",
            Group.COMPUTE,
            choices=("auto", "bfloat16", "float16", "float32"),
        ),
    ] = "auto"
    weight_bits: Annotated[
        int | None,
        Setting(
            "Round weights to so many bits while they are loaded: 8 or 4 for the layers, 8 for"
            " embedding and head. What has no more stays as it is.",
            Group.MODEL,
            choices=(8, 4),
            default_is="as they are stored",
        ),
    ] = None
    end_bits: Annotated[
        int | None,
        Setting(
            "Round embedding and head to so many bits while they are loaded, 8 or 4, whatever the"
            " layers have. What has no more stays as it is.",
            Group.MODEL,
            choices=(8, 4),
            default_is="8 with weight_bits, else as they are stored",
        ),
    ] = None
    kernels: Annotated[
        str,
        Setting(
            "auto; torch, without the C library: slower, and a seeded answer may change with what"
            " else is in the batch; or reference: slow, to compare.",
            Group.COMPUTE,
            choices=("auto", "torch", "reference"),
        ),
    ] = "auto"
    cpu_isa: Annotated[
        str,
        Setting(
            "Instructions of the C library: auto, the fastest that this CPU has and its system"
            " permits; or amx, avx512, avxvnni, avx2, i8mm, neon, scalar.",
            Group.COMPUTE,
            choices=("auto", "amx", "avx512", "avxvnni", "avx2", "i8mm", "neon", "scalar"),
        ),
    ] = "auto"
    prompt_int8: Annotated[
        bool,
        Setting(
            "Round the inputs of 4-bit linears to 8 bits for prompts, which integer tensor cores of"
            " GeForce cards multiply at up to four times the rate; answers are computed as ever. It"
            " loses a little, which the quality card and min_quality tell.",
            Group.COMPUTE,
        ),
    ] = False
    kv_cache_dtype: Annotated[
        str,
        Setting(
            "Precision of the KV cache: auto, bf16, int8, fp8, k8v4, int4 and more.",
            Group.KV,
            choices=(
                "auto",
                "fp32",
                "fp16",
                "bf16",
                "fp8",
                "int8",
                "k8v4",
                "int4",
                "int4-sealed",
                "int4-rotated",
            ),
        ),
    ] = "auto"
    mamba_cache_dtype: Annotated[
        str,
        Setting(
            "Precision in which recurrent states (Mamba, Gated DeltaNet, short convolutions) are"
            " kept between steps: auto, fp32, fp16 or bf16; auto is fp32, and fp16 is closer than"
            " bf16 in as much memory.",
            Group.KV,
            choices=("auto", "fp32", "fp16", "bf16"),
        ),
    ] = "auto"
    images: Annotated[
        bool,
        Setting(
            "Read pictures, where the model has a vision tower; its weights, and room for one"
            " picture at a time, are in the memory plan. Off serves texts alone.",
            Group.MODEL,
        ),
    ] = True
    mmproj: Annotated[
        str,
        Setting(
            "Projector file (mmproj) with the vision tower of a GGUF model.",
            Group.MODEL,
            default_is="the nearest one beside the model",
        ),
    ] = ""
    image_tokens: Annotated[
        str,
        Setting(
            "Rows of the prompt that a picture may take, as LEAST:MOST, of which one may be left"
            " out, such as 64:1024 or :256. Fewer rows are encoded and read sooner, and show less.",
            Group.MODEL,
            default_is="as the model's own processor has it, up to 4096",
        ),
    ] = ""
    max_model_len: Annotated[
        int | None,
        Setting(
            "Longest context.",
            Group.STEPS,
            unit=Unit.TOKENS,
            low=16,
            high=2**24,
            default_is="the model's own",
        ),
    ] = None
    max_num_seqs: Annotated[
        int, Setting("Sequences that run at once.", Group.STEPS, low=1, high=1024)
    ] = 32
    max_num_batched_tokens: Annotated[
        int,
        Setting(
            "Most tokens that one step computes.", Group.STEPS, unit=Unit.TOKENS, low=16, high=2**20
        ),
    ] = 512
    block_size: Annotated[
        int | None,
        Setting(
            "Token slots of a KV block: 8, 16, 32 or 64.",
            Group.KV,
            choices=(8, 16, 32, 64),
            default_is="16, on a GPU 32",
        ),
    ] = None
    kv_cache_memory: Annotated[
        int | None,
        Setting(
            "Memory for the KV cache, such as 2GiB.",
            Group.KV,
            unit=Unit.BYTES,
            low=2**14,
            high=MOST_BYTES,
            default_is="planned from what is free",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float, Setting("Share of the GPU's memory to use.", Group.COMPUTE, low=0.05, high=1.0)
    ] = 0.90
    cuda_graphs: Annotated[
        str,
        Setting(
            "Replay decode steps, and small ones with prompts, as CUDA graphs: auto or off.",
            Group.COMPUTE,
            choices=("auto", "off"),
        ),
    ] = "auto"
    tune: Annotated[
        str,
        Setting(
            "Time at a start, for at most five seconds, which launches of linears, experts and"
            " attention are fastest on the GPUs, and keep it: auto or off. What is not timed yet is"
            " computed; appliance tune times all of it.",
            Group.COMPUTE,
            choices=("auto", "off"),
        ),
    ] = "auto"
    generation_config: Annotated[
        str,
        Setting(
            "Default sampling as the model's makers recommend: auto or off.",
            Group.REQUESTS,
            choices=("auto", "off"),
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        Setting("CPU threads.", Group.COMPUTE, low=1, high=1024, default_is="the physical cores"),
    ] = None
    experts_on_cpu: Annotated[
        int | None,
        Setting(
            "Layers whose experts stay in host memory, where the CPU multiplies them for the GPU.",
            Group.COMPUTE,
            low=0,
            high=1024,
            default_is="as few as the GPU's memory allows",
        ),
    ] = None
    prefix_caching: Annotated[
        bool, Setting("Reuse the KV cache of prefixes that prompts share.", Group.KV)
    ] = True
    kv_disk: Annotated[
        str,
        Setting(
            "Folder that keeps KV cache across restarts, or off. It keeps only the beginning that a"
            " prompt shares with an earlier prompt and its answer, where that is 256 tokens or"
            " longer. auto is the cache folder for a server, and off in a script.",
            Group.KV,
        ),
    ] = "auto"
    kv_disk_size: Annotated[
        int,
        Setting(
            "Size limit of this folder, all models together.",
            Group.KV,
            unit=Unit.BYTES,
            low=MIB,
            high=MOST_BYTES,
        ),
    ] = 4 * GIB
    packed_weights: Annotated[
        str,
        Setting(
            "Folder that keeps weights as the CPU library multiplies them, so that later starts map"
            " them, or off. auto is the cache folder for a server, and off in a script.",
            Group.COMPUTE,
        ),
    ] = "auto"
    packed_weights_size: Annotated[
        int,
        Setting(
            "Size limit of this folder, all models together.",
            Group.COMPUTE,
            unit=Unit.BYTES,
            low=MIB,
            high=MOST_BYTES,
        ),
    ] = 32 * GIB
    kv_host_memory: Annotated[
        int | None,
        Setting(
            "Host memory for KV blocks that leave the cache; 0 recomputes them.",
            Group.KV,
            unit=Unit.BYTES,
            low=0,
            high=MOST_BYTES,
            default_is="planned from what is free",
        ),
    ] = None
    state_checkpoint_memory: Annotated[
        int | None,
        Setting(
            "Memory for checkpoints of recurrent state, which prefixes of such models need.",
            Group.KV,
            unit=Unit.BYTES,
            low=0,
            high=MOST_BYTES,
            default_is="planned from what is free",
        ),
    ] = None
    speculate: Annotated[
        str,
        Setting(
            "Propose the next tokens of answers and verify several in a step, which changes no"
            " answer: auto, off, suffix, mtp, draft=MODEL or eagle=PATH. All look the last tokens"
            " up in the text and in earlier answers; draft=MODEL also asks a smaller model of the"
            " same vocabulary, draft=self the model itself at 4 bits, mtp the head for multi-token"
            " prediction that the checkpoint brings, eagle=PATH an EAGLE-3 head that was made for"
            " the model, a folder or a hub id. Drafts are run as long as they pay; auto takes the"
            " checkpoint's head too, if there is one, and speculates where it can.",
            Group.STEPS,
            choices=("auto", "off", "suffix", "mtp"),
            named=("draft=MODEL", "eagle=PATH"),
        ),
    ] = "auto"
    speculate_tokens: Annotated[
        int,
        Setting(
            "Most tokens proposed for a sequence in a step.",
            Group.STEPS,
            unit=Unit.TOKENS,
            low=1,
            high=15,
        ),
    ] = 15

    def __post_init__(self) -> None:
        check_all(self)
        named_paths(self.lora, "lora")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must not be less than "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence needs a row per step"
            )

    @property
    def is_divided(self) -> bool:
        """True if several processes share one model."""
        return self.num_ranks > 1 or self.gpu_split not in ("auto", "1")

    @property
    def num_ranks(self) -> int:
        """Processes for one copy of the model."""
        return self.ranks * self.tensor_parallel * self.pipeline_parallel

    @property
    def ranks_settings(self) -> tuple[str, ...]:
        """The settings that ask for these processes, with their values."""
        counts = {
            "--ranks": self.ranks,
            "--tensor-parallel": self.tensor_parallel,
            "--pipeline-parallel": self.pipeline_parallel,
        }
        return tuple(f"{name} {count}" for name, count in counts.items() if count > 1)

    @property
    def ranks_setting(self) -> str:
        """The only one of these; without any the one that means a single process."""
        return self.ranks_settings[0] if self.ranks_settings else "--ranks 1"

    @property
    def draft_model(self) -> str:
        """The draft model, `SELF_DRAFT` or a name; empty if there is none."""
        return self._named("draft")

    @property
    def eagle_head(self) -> str:
        return self._named("eagle")

    def _named(self, wanted: str) -> str:
        method, _, name = self.speculate.partition("=")
        return name if method == wanted else ""
