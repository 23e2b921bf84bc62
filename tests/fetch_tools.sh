#!/usr/bin/env bash
# Fetches Prometheus and Alertmanager (or VictoriaMetrics, or what reads docker-compose.yml) as Debian releases have them,
# and unpacks them into .tools/:
#
#     tests/fetch_tools.sh bookworm trixie sid victoria-sid compose-trixie
#
# As an ordinary user, with package lists and downloads of its own: nothing is installed and nothing started. What is
# there stays. What cannot be had leaves .tools/NAME.missing with the reason, and the tests on it are skipped with that.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools=$PWD/.tools
apt=$tools/apt

packages_of() {
    case $1 in
    victoria-*) echo victoria-metrics ;;
    compose-*) echo docker-compose prometheus-node-exporter ;;
    bookworm | system) echo prometheus prometheus-alertmanager ;;
    *) echo prometheus promtool prometheus-alertmanager ;;  # From 2.53 on promtool is a package of its own.
    esac
}

# apt-get on our own folders, and on our own sources unless they are to be the system's.
apt_get() {
    local own=(-o Dir::State::lists="$apt/lists" -o Dir::Cache="$apt/cache" -o APT::Sandbox::User=root)
    test -s "$apt/sources.list" && own+=(-o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=-)
    apt-get "${own[@]}" "$@"
}

# The lists of the given releases, from the mirror that this Debian uses itself; of `system`, the system's own.
update() {
    rm -rf "$apt"
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
    command -v apt-get >/dev/null || { echo "no apt-get here" >&2; return 1; }
    if test "$1" != system; then
        local codename mirror keys=/usr/share/keyrings/debian-archive-keyring.gpg
        codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-none}")
        mirror=$(apt_get update --print-uris | sed -n "s#^'\(.*\)/dists/$codename/main/binary-.*#\1#p" | head -n 1)
        test -e $keys -a -n "$mirror" || { echo "no mirror of Debian in this system's apt sources" >&2; return 1; }
        printf "deb [signed-by=$keys] $mirror %s main\n" "$@" >"$apt/sources.list"
    fi
    apt_get -qq update
}

# Debian's builds look for pages and templates in /usr/share/prometheus. In these copies that becomes a path of the same
# length from the folder in which the program runs, and demo and tests run it in its own.
fetch() {
    local name=$1 release=/${1##*-} new=$tools/new package program
    rm -rf "$new" && mkdir -p "$new/debs" && cd "$new/debs"
    test "$name" = system && release=
    for package in $(packages_of "$name"); do apt_get -qq download "$package$release" || return; done
    for package in *.deb; do dpkg-deb -x "$package" "$new" || return; done
    case $name in
    victoria-*) program=$new/usr/bin/vmalert ;;
    compose-*) program=$new/usr/bin/prometheus-node-exporter ;;
    *)
        program=$new/usr/bin/prometheus
        LC_ALL=C sed -i 's#/usr\(/share/prometheus\)#./..\1#g' "$new"/usr/bin/prometheus* || return
        ;;
    esac
    "$program" --version >"$new/version" || return  # It may want a newer libc than this system has.
    mkdir -p "$tools/$name" && mv "$new/usr" "$tools/$name/"
}

get() {
    local name wanted=() releases
    for name in "$@"; do test -d "$tools/$name" || wanted+=("$name"); done
    test ${#wanted[@]} -gt 0 || return 0
    mkdir -p "$tools"
    echo "fetching servers into .tools: ${wanted[*]}"
    releases=$(printf '%s\n' "${wanted[@]##*-}" | sort -u)
    (update $releases) 2>"$tools/update.log" || true
    for name in "${wanted[@]}"; do
        if (fetch "$name") 2>"$tools/fetch.log"; then
            rm -f "$tools/$name.missing"
        else
            cat "$tools"/{update,fetch}.log | tr -s '\n' ' ' >"$tools/$name.missing"
            echo "$name cannot be had: $(cat "$tools/$name.missing")"
        fi
    done
    rm -rf "$apt" "$tools/new" "$tools"/*.log
}

get "$@"
# What the demo runs and `make` has on its PATH: the oldest release, else what this system's own sources have.
test -d "$tools/bookworm" || get system
for name in bookworm system; do
    test -d "$tools/$name" || continue
    rm -rf "$tools/usr" && ln -s "$name/usr" "$tools/usr"
    break
done
