"""Writes the index of all recipes, from which `torchrex list` answers without torch."""

from __future__ import annotations

import json
from collections import Counter

from torchrex.cli.listing import INDEX
from torchrex.cli.outputs import OUTPUTS
from torchrex.experiments import recipes, to_json
from torchrex.runs.config import descriptions


def build() -> str:
    """One line for each recipe, kind of config, and output of reproduce."""
    known = {name: (config, to_json(config)) for name, config in recipes().items()}
    usual, said, others = {}, {}, {}
    for kind in {type(config): None for config, _ in known.values()}:
        each = [settings for config, settings in known.values() if type(config) is kind]
        texts = {name: [json.dumps(one[name]) for one in each] for name in each[0]}
        often = {name: Counter(found).most_common(1)[0][0] for name, found in texts.items()}
        usual[kind.__name__] = {name: json.loads(text) for name, text in often.items()}
    for name, (config, settings) in known.items():
        kind = type(config).__name__
        said.setdefault(kind, descriptions(config))
        factor = config.correction_factor if config.n_rungs > 1 and config.swaps else None
        row = to_json([config.n_rungs, factor, config.n_steps, config.n_runs])
        own = {**usual[kind], "recipe": name}
        other = {key: value for key, value in settings.items() if value != own[key]}
        others[name] = {"kind": kind, "row": row, "other": other}
    outputs = {what: list(output.recipes()) for what, output in OUTPUTS.items()}
    parts = {"usual": usual, "said": said, "outputs": outputs, "recipes": others}
    texts = [
        f'"{part}": {{\n'
        + ",\n".join(f'"{key}": {json.dumps(each)}' for key, each in values.items())
        + "\n}"
        for part, values in parts.items()
    ]
    return "{" + ",\n".join(texts) + "}\n"


if __name__ == "__main__":
    INDEX.write_text(build())
