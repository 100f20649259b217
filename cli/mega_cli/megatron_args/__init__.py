"""Translation of Megatron-LM launch scripts into run.yaml. Imports no torch.

    translation = translate(Path("pretrain.sh").read_text())
    print(to_yaml(translation))

`launch` finds the training command of a script. For that `script` follows it statement by statement (with `loops`,
`assignments`, `commands` and `conditions`; `merge` where nobody knows which way it goes), over the tree that tree-sitter
makes of it (`syntax`), and `expand` its words (with `globs`, `arithmetic`, and `output` for what small commands print).
What only a running shell knows stays in a `shell.ShellWord` as a mark.

`parse` reads the arguments of the command, and `model` (with `experts` and `patterns`), `data`, `stages`, `training` and
`schedule` turn them into the sections of a run. `flags.csv` is the table of Megatron-LM's flags, `forks.csv` that of what
its forks add, and `handling.yaml` tells what becomes of those that no key comes from.
"""

from mega_cli.megatron_args.render_yaml import render_run_yaml
from mega_cli.megatron_args.run_draft import FlagNote
from mega_cli.megatron_args.translate import ScriptTranslation, translate_script

__all__ = ["FlagNote", "ScriptTranslation", "render_run_yaml", "translate_script"]
