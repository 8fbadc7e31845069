"""A tiny functional test of an installed wheel: the quantizer's worked example, and a bad shape."""

from __future__ import annotations

import torch

import cake  # noqa: F401  loads the operations

VALUES = [0.5, -1, 2, -3, 0.1, 0.2, -0.3, 0.7, 1.1, -1.3, 1.9, 2.2, -2.6, 2.9, 0.05, -0.01]
# Encoding scale -> (block scale byte, code bytes), worked by hand.
EXPECTED = {
    1.0: (0x30, "c2f61039d4667f80"),
    896.0: (0x7E, "c2f61039d4667f80"),
    100.0: (0x65, "c2f61039c4667e80"),
}


def quantize(scale: float, packed_columns: int = 8) -> tuple[int, str]:
    """Block scale and codes of the example, from the operation itself."""
    packed = torch.zeros(1, packed_columns, dtype=torch.uint8)
    sf = torch.zeros(1, 1, dtype=torch.uint8)
    values = torch.tensor([VALUES], dtype=torch.bfloat16)
    torch.ops.cake.quantize_nvfp4(values, torch.tensor([scale]), packed, sf)
    return int(sf.item()), bytes(packed[0].tolist()).hex()


def main() -> None:
    for scale, wanted in EXPECTED.items():
        found = quantize(scale)
        if found != wanted:
            raise SystemExit(f"quantize_nvfp4, input_scale {scale}: {found}, expected {wanted}")
    try:
        quantize(1.0, packed_columns=7)
    except (RuntimeError, ValueError) as error:
        message = str(error).splitlines()[0]
        print(f"   a bad shape raises {type(error).__name__}: {message}")
    else:
        raise SystemExit("quantize_nvfp4 accepted packed of shape [1, 7] for 16 values")
    print("   quantize_nvfp4: the worked example's bytes")


if __name__ == "__main__":
    main()
