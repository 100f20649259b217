"""Translation of Megatron-LM launch scripts into run.yaml. Imports no torch.

    translation = translate_launch_script(Path("pretrain.sh").read_text())
    print(render_run_yaml(translation))

`training_command` finds the training command of a script. `script_reader` interprets the script statement by statement
over its tree-sitter syntax tree (`syntax_tree`), with `control_flow`, `assignments`, `shell_commands` and `conditions`,
which share a `script_state.ShellInterpreter`; `script_variables` merges the variables of branches whose condition is unknown.
`word_expansion` expands words, with `shell_patterns`, `arithmetic`, and `text_tools` for the output of small commands.
Values that only a running shell has stay in a `shell_words.ShellWord` as a mark.

`flag_tables` parses the arguments of the command, and the modules `*_section`, `training_sections`, `hybrid_layers` and
`bert_and_t5` write the sections of run.yaml, which `translate` renders. `flags.csv` is the table of Megatron-LM's flags,
`forks.csv` the table of flags added by forks, and `handling.yaml` has the notes on flags without a key in run.yaml.
"""

from mega_cli.megatron_args.run_draft import FlagTranslationNote
from mega_cli.megatron_args.translate import RunYamlTranslation, render_run_yaml, translate_launch_script

__all__ = ["FlagTranslationNote", "RunYamlTranslation", "render_run_yaml", "translate_launch_script"]
