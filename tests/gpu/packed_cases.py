"""Widths and groups of packed matrices that every product with them is tried on."""

# (bits, rows) of each group of a matrix
PLANS = {
    **{f"{bits} bits, groups of {size}": [(bits, size)] * (512 // size) for bits in (8, 6, 5, 4, 3, 2)
       for size in (32, 64, 128)},
    "one tile": [(4, 32)],
    "groups of 96": [(4, 96)] * 5,
    "every width": [(8, 32), (8, 96), (6, 64), (5, 128), (5, 32), (4, 128), (3, 64), (3, 32), (2, 128), (2, 256)],
    "short last group": [(6, 128), (4, 128), (4, 128), (4, 32)],
}  # fmt: skip
