"""Dense attention: everything stays, everything is read."""

from sparsejax.method import Method, NoParams


def build(params: NoParams) -> Method:
    return Method("dense", "none", params, summary="keep every row, read every row")


PARAMS = NoParams
NOTES = {
    "Keeps": "Everything.",
    "Acts": "Never.",
    "Costs": "n rows per layer, all of them read in every step.",
    "Use it": "As long as memory and time allow.",
}
