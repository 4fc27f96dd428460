"""The environment of the engine process: how its arithmetic threads wait for each other. Read by libgomp at load."""


def worker_environment() -> dict[str, str]:
    """Variables the worker starts with where the user set none.

    libgomp's threads spin for a while before they sleep. Its default, spinning for minutes, collapses decoding from 95
    to under 15 tok/s when a repainting screen shares the two cores; sleeping at once costs 40 % on quiet cores. A short
    spin is near the best of both.
    """
    return {"GOMP_SPINCOUNT": "10000"}
