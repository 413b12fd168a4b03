"""The formats of matrices in eight bits: values times a scale.

Owns: what each engine's quantisation means in numbers. Does not own: the arithmetic
(`rounding.py`) or which parameters have a format (`quantized_parameters.py`). Invariant: free of
torch, because controller and planner read it; a format does not depend on how many ranks share a
matrix, so replicas of any size decode with the same numbers.
"""

from dataclasses import dataclass

from llamarl.config import EmbeddedConfig, GeneratorConfig, VllmConfig
from llamarl.config.pools import pools_of
from llamarl.models.other_architecture import AnyArchitecture, OtherArchitecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a matrix W [out, in] becomes values [out, in] of `dtype` and scales of `scale_dtype`.

        W'     = W in base_dtype                            what the engine would have been given
        scale  = max(max|W'| / largest, smallest_scale)     of a row, or of all rows
        values = W' / scale, between -largest and largest, rounded to dtype

    With `is_per_tensor` one scale is that of all matrices that the engine multiplies with as one,
    such as q, k and v. With `is_inverted` W' is multiplied by 1 / scale, which may round
    differently. `has_head` says that the head, tied or not, is quantised as well as the matrices of
    the layers. `key` is part of the names of parameters in this format.
    """

    key: str
    dtype: str
    largest: float
    base_dtype: str
    scale_dtype: str
    smallest_scale: float
    is_per_tensor: bool = False
    is_inverted: bool = False
    has_head: bool = False


FP8 = "float8_e4m3fn"
LARGEST = {"int8": 127.0, FP8: 448.0}
VLLM_SMALLEST = 1.0 / (LARGEST[FP8] * 512.0)  # of its scales of rows; of a tensor's there is none


def format_of(generator: GeneratorConfig, architecture: AnyArchitecture) -> Format | None:
    """What a replica's matrices are in; None if not in eight bits, or if the family's matrices are
    not known: vLLM then quantises them itself at each commit."""
    quantization, dtype = generator.quantization, generator.dtype
    if quantization == "none" or isinstance(architecture, OtherArchitecture):
        return None
    if isinstance(generator, VllmConfig):
        is_per_tensor = quantization == "fp8"
        return Format(
            key=f"{quantization}-{dtype}",
            dtype=FP8,
            largest=LARGEST[FP8],
            base_dtype=dtype,
            scale_dtype="float32",
            smallest_scale=0.0 if is_per_tensor else VLLM_SMALLEST,
            is_per_tensor=is_per_tensor,
            is_inverted=is_per_tensor,
        )
    assert isinstance(generator, EmbeddedConfig), generator
    values = FP8 if quantization == "fp8" else quantization
    return Format(
        key=f"rows-{quantization}-{dtype}",
        dtype=values,
        largest=LARGEST[values],
        base_dtype=dtype,
        scale_dtype=dtype,  # the engine applies them to activations of this dtype
        smallest_scale=1e-30,  # a row of zeros would divide by zero
        has_head=True,
    )


Kind = str | Format
"""What a replica's weights are in: a dtype, or a format of its matrices."""


def kinds_of(generator: GeneratorConfig, architecture: AnyArchitecture) -> tuple[Kind, ...]:
    """Those of all pools, each once."""
    pools = [pool.generator for pool in pools_of(generator)]
    return tuple(dict.fromkeys(format_of(each, architecture) or each.dtype for each in pools))


def formats_of(generator: GeneratorConfig, architecture: AnyArchitecture) -> tuple[Format, ...]:
    """Those of all pools, each once."""
    return tuple(kind for kind in kinds_of(generator, architecture) if isinstance(kind, Format))
