# What the scripts share. Sourced, not run.

# Says one step, and how long the last one took.
step_name=""
step_start=0
step() {
    local now; now=$(date +%s)
    [ -z "$step_name" ] || echo "--- $step_name: $((now - step_start)) s"
    step_name=${1:-}
    step_start=$now
    [ -z "$step_name" ] || echo "=== $step_name"
}

# need COMMAND PACKAGE...: installs Debian packages where COMMAND is missing and this is root; says what to do elsewhere.
need() {
    local command=$1; shift
    command -v "$command" > /dev/null && return
    install "$command" "$@"
}

# install WHAT PACKAGE...
install() {
    local what=$1; shift
    if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
        echo "installing $* for $what"
        apt-get update -qq > /dev/null
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" > /dev/null
    else
        echo "error: $what is missing; install it first, on Debian: sudo apt-get install $*" >&2
        exit 1
    fi
}

# Rust, and the linker that it calls.
need_rust() {
    need cc gcc libc6-dev
    if ! command -v cargo > /dev/null; then
        [ -x "$HOME/.cargo/bin/cargo" ] && export PATH="$HOME/.cargo/bin:$PATH" && return
        echo "error: cargo is missing; install Rust 1.89 or later from https://rustup.rs" >&2
        exit 1
    fi
}

# Python with pip: models and NVIDIA's compiler come as Python packages.
need_pip() {
    need python3 python3
    python3 -m pip --version > /dev/null 2>&1 || install pip python3-pip
}
