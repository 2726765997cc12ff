# For scripts that fetch from a Debian release of their choice: apt with lists of its own. The machine's
# are left alone.
lists=$(mktemp -d)
trap 'rm -rf "$lists"' EXIT
mkdir -p "$lists/lists/partial" "$lists/cache/archives/partial"
from_suite=(-o Dir::Etc::SourceList="$lists/sources.list" -o Dir::Etc::SourceParts=/nonexistent
    -o Dir::State::Lists="$lists/lists" -o Dir::Cache="$lists/cache" -o APT::Sandbox::User=root)

# use_suite deb|deb-src SUITE: then apt-get and apt-cache take it with "${from_suite[@]}".
use_suite() {
    local mirror
    mirror=${MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 'Created-By: Packages' | head -n 1)}
    echo "$1 [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $2 main" >"$lists/sources.list"
    apt-get -qq "${from_suite[@]}" update
}
