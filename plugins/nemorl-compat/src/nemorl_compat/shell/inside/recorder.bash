# Read by bash before a script (BASH_ENV): no command is run, each is written down to descriptor 200 instead.
#
# A record is a kind, a number of fields and the fields, each ended by a zero byte. Kinds: `ran` (a command's words),
# `skipped` (words of what is left out), `branch` (a variable that a condition looks at, `set` or `unset`, its value).
# What only computes on text (dirname, date, …) is computed, a shell script that is called is read; `python -c` fails,
# as a test whether a module can be imported does without modules; all else succeeds and prints nothing.

unset BASH_ENV
__nemorl_word="([^][:space:]\"';&|<>()\`]|\\]|\"[^\"\`]*\"|'[^']*')+"
__nemorl_assignment='^[A-Za-z_][A-Za-z0-9_]*='
__nemorl_to_file="^(.*)[[:space:]][0-9]*(>|>>|>\\||&>|&>>)[[:space:]]?($__nemorl_word|>\\(.*\\))\$"
__nemorl_to_descriptor='^(.*)[[:space:]][0-9]*>&[0-9-]+$'

__nemorl_record() {
    local kind=$1
    shift
    printf '%s\0' "$kind" "$#" "$@" >&200
}

__nemorl_read_script() { # the rest of its words are the script's own
    local path=$1
    shift
    [[ $path == */* ]] || path=./$path
    if [[ -r $path ]]; then
        (builtin source "$path" "$@")
    else
        __nemorl_record skipped source "$path"
    fi
}

__nemorl_absolute() {
    local path=${!#}
    if [[ -d $path ]]; then
        (builtin cd "$path" && pwd)
    elif [[ $path == */* ]]; then
        (builtin cd "${path%/*}/" 2> /dev/null && printf '%s/%s\n' "$PWD" "${path##*/}") || printf '%s\n' "$path"
    else
        printf '%s/%s\n' "$PWD" "$path"
    fi
}

__nemorl_lines() {
    local line
    while IFS= read -r line || [[ -n $line ]]; do printf '%s\n' "$line"; done
}

recorded_words() { eval "$1"; }

command_not_found_handle() {
    local -
    set +eux
    local name=${1##*/} path
    case $name in
        which)
            __nemorl_record skipped "$@"
            return 1
            ;;
        python*)
            if [[ ${2-} == -c ]]; then
                __nemorl_record skipped "$@"
                return 1
            fi
            ;;
        bash | sh)
            if [[ ${2-} == -c ]]; then
                (recorded_words "${3-}")
                return
            elif [[ ${2-} == *.sh ]]; then
                __nemorl_read_script "${@:2}"
                return
            fi
            ;;
        *.sh)
            __nemorl_read_script "$@"
            return
            ;;
        dirname)
            path=${2%/}
            if [[ $path == */* ]]; then printf '%s\n' "${path%/*}"; else echo .; fi
            return
            ;;
        basename)
            path=${2%/}
            path=${path##*/}
            printf '%s\n' "${path%"${3-}"}"
            return
            ;;
        realpath | readlink)
            __nemorl_absolute "${@:2}"
            return
            ;;
        cat)
            if (($# == 1)); then __nemorl_lines; fi
            for path in "${@:2}"; do
                if [[ -r $path ]]; then __nemorl_lines < "$path"; else __nemorl_record skipped cat "$path"; fi
            done
            return
            ;;
        date)
            if [[ ${2-} == +* ]]; then
                printf "%(${2#+})T\n" -1
                return
            fi
            ;;
    esac
    __nemorl_record ran "$@"
}

# The variables of a condition.
__nemorl_branch() {
    local rest=$1 name
    while [[ $rest =~ \$\{?[!#]?([A-Za-z_][A-Za-z0-9_]*)(.*) ]]; do
        name=${BASH_REMATCH[1]} rest=${BASH_REMATCH[2]}
        if [[ -v $name ]]; then __nemorl_record branch "$name" set "${!name}"; else __nemorl_record branch "$name" unset ""; fi
    done
}

# The first of some words as the script means it, where that needs no command.
__nemorl_first() {
    if [[ $1 =~ ^$__nemorl_word && ${BASH_REMATCH[0]} != *'$('* ]]; then
        eval "set -- ${BASH_REMATCH[0]}" && printf '%s' "${1-}"
    fi
}

# What is evaluated before a command (of which this is the text): the end of it says whether the command follows.
# In a subshell of its own, so that the script's variables, options and BASH_REMATCH stay what they are.
__nemorl_look() {
    [[ ${FUNCNAME[1]-} != __nemorl* && ${FUNCNAME[1]-} != command_not_found_handle ]] || return 0
    set +eux
    exec 2> /dev/null
    local text=$1 bare=$1 command is_written=0 first second
    case $text in
        '[ '* | 'test '*) __nemorl_branch "$text" ;;
        '[['* | 'case '*) __nemorl_branch "$text" && return ;;
        '(('*)
            for first in ${text//[!A-Za-z0-9_]/ }; do
                if [[ $first == [A-Za-z_]* ]]; then __nemorl_branch "\$$first"; fi
            done
            return
            ;;
        'for '*) return ;;
        'command -'* | 'type '* | 'hash '*) __nemorl_record skipped $text ;;
        'ulimit '*) echo '__nemorl_skip' && return ;;
        'cat '*'>'*'<<'* | 'tee '*'<<'*)
            __nemorl_record skipped "${text%% *}"
            echo '__nemorl_skip'
            return
            ;;
    esac
    while [[ $bare =~ $__nemorl_to_file || $bare =~ $__nemorl_to_descriptor ]]; do # a file cannot be written
        bare=${BASH_REMATCH[1]}
        if [[ ${BASH_REMATCH[3]-/dev/null} != /dev/null ]]; then is_written=1; fi
    done
    if ((is_written)); then command=$bare; else command=$text; fi
    if [[ $bare == exec ]]; then
        if ((is_written)); then echo '__nemorl_skip'; fi
        return
    elif [[ $bare == 'exec '[!0-9\<\>\&{-]* ]]; then
        echo "${bare#exec }; exit"
        return
    fi
    while [[ $bare =~ $__nemorl_assignment && $bare =~ ^[^[:space:]=]*=($__nemorl_word)?[[:space:]]+(.*) ]]; do
        bare=${BASH_REMATCH[3]}
    done
    first=$(__nemorl_first "$bare")
    case $first in
        cd | pushd | source | .)
            second=$(__nemorl_first "${bare#* }")
            if [[ $second == - ]]; then second=${OLDPWD-/nonexistent}; fi
            if [[ -n $second ]]; then
                if [[ $first == *d && ! -d $second || $first != *d && ! -r $second ]]; then
                    __nemorl_record skipped "$first" "$second"
                    echo '__nemorl_skip'
                    return
                fi
            fi
            ;;
        */*)
            if [[ $first =~ ^[A-Za-z0-9_./~+-]+$ ]] && ! declare -F -- "$first" > /dev/null; then
                printf 'function %s { command_not_found_handle %s "$@"; }; ' "$first" "$first"
            fi
            ;;
    esac
    if ((is_written)); then printf '%s\n' "$command" '__nemorl_skip'; fi
}

__nemorl_skip() { return 1; }

# extdebug: a command before which the trap ends with 1 is not run. bash does not take it from a file it starts with.
# `!`: so that `set -e` does not end the script.
trap 'shopt -s extdebug; if ! eval "$(__nemorl_look "$BASH_COMMAND")"; then ! :; fi' DEBUG
