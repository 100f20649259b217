"""Translates launch scripts of Megatron-LM into run.yaml. No torch.

    translation = translate(Path("pretrain.sh").read_text())
    print(to_yaml(translation))

`shell`, `conditions`, `arithmetic` and `script` read the script, `launch` finds the training command in it, `parse` reads
its arguments, and `model` (with `experts` and `patterns`), `data`, `stages`, `training` and `schedule` turn them into the
sections of a run. `flags.csv` is the table of Megatron-LM's flags, `forks.csv` that of what its forks add, and
`handling.yaml` tells what becomes of those that no key comes from.
"""

from mega_cli.megatron_args.draft import Note
from mega_cli.megatron_args.render import to_yaml
from mega_cli.megatron_args.translate import Translation, translate

__all__ = ["Note", "Translation", "to_yaml", "translate"]
