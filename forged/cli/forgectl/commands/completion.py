"""`forgectl completion`: the scripts for completion in shells.

A script passes the words of the command line to the hidden command "complete" and its candidates to the shell. All
decisions are made there.
"""

from __future__ import annotations

import argparse

from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options, Parser
from forged.cli.process import EXIT_OK

BASH = r"""# forgectl's completion for bash: source <(forgectl completion bash)
_forgectl() {
    local line=${COMP_LINE:0:COMP_POINT} breaks=${COMP_WORDBREAKS//[^=:@]/} kept="" tilde candidate words
    read -r -a words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    # Bash replaces only what follows the last of these characters.
    [[ -n $breaks ]] && kept=${words[-1]%"${words[-1]##*[$breaks]}"}
    COMPREPLY=()
    while IFS= read -r candidate; do
        candidate=${candidate%%$'\t'*}
        [[ $candidate == *[=/@] ]] && compopt -o nospace
        candidate=${candidate#"$kept"}
        tilde=""
        [[ $candidate == "~/"* ]] && tilde="~/"
        [[ -n $candidate ]] && printf -v "COMPREPLY[${#COMPREPLY[@]}]" '%s%q' "$tilde" "${candidate#"$tilde"}"
    done < <("${1/#"~/"/"$HOME/"}" complete -- "${words[@]:1}" 2> /dev/null)
}
complete -F _forgectl forgectl
"""

ZSH = r"""#compdef forgectl
# forgectl's completion for zsh: source <(forgectl completion zsh), or put it into $fpath as _forgectl
_forgectl() {
    local candidate meaning shown
    local -a typed finished finished_shown open open_shown
    (( CURRENT > 2 )) && typed=("${(@)words[2,CURRENT-1]}")
    typed+=("$PREFIX")
    while IFS=$'\t' read -r candidate meaning; do
        shown=$candidate${meaning:+"  -- $meaning"}
        if [[ $candidate == *[=/@] ]]; then
            open+=("$candidate")
            open_shown+=("$shown")
        else
            finished+=("$candidate")
            finished_shown+=("$shown")
        fi
    done < <("${words[1]/#\~\//$HOME/}" complete -- "${(@)typed}" 2> /dev/null)
    (( $#finished )) && compadd -l -d finished_shown -a -- finished
    (( $#open )) && compadd -l -S '' -d open_shown -a -- open
    return 0
}
if [[ $funcstack[1] == _forgectl ]]; then
    _forgectl "$@"
else
    compdef _forgectl forgectl
fi
"""

FISH = r"""# forgectl's completion for fish: source (forgectl completion fish | psub)
function __forgectl_complete
    set -l words (commandline -opc)
    set -l program $words[1]
    set -e words[1]
    set -l begun (commandline -ct)
    $program complete -- $words "$begun" 2> /dev/null
end
complete --command forgectl --no-files --arguments '(__forgectl_complete)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}

LOADING = """\
to load it in every new shell, add to
  ~/.bashrc                     source <(forgectl completion bash)
  ~/.zshrc, after compinit      source <(forgectl completion zsh)
  ~/.config/fish/config.fish    source (forgectl completion fish | psub)"""


def fill(script: Parser) -> None:
    """Add the arguments."""
    script.set_defaults(act=_print_script)
    script.add_argument("shell", choices=tuple(SCRIPTS))
    script.epilog = LOADING
    script.formatter_class = argparse.RawDescriptionHelpFormatter


def _print_script(options: Options) -> int:
    script = SCRIPTS[options.shell]
    answer(options, {"shell": options.shell, "script": script}, lambda: print(script, end=""))
    return EXIT_OK
