#!/bin/sh
# Install packages on Debian or Ubuntu, as root, without any service being started, now or at the next boot.
#
# policy-rc.d is Debian's own way to forbid it: 101 means "not allowed". One that is there already belongs to somebody and
# stays as it is; ours is taken away again however this ends, and if it ends by SIGKILL, by the next run.
set -eu
policy=/usr/sbin/policy-rc.d
mark='labkit set-up: starts no service while packages are installed'

installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }
fresh=
installed rabbitmq-server || fresh="$fresh rabbitmq-server.service"
installed erlang-base || fresh="$fresh epmd.service epmd.socket"

leave() {
    code=$?
    trap '' INT TERM HUP
    if grep -qs "$mark" "$policy"; then rm -f "$policy"; fi
    for unit in $fresh; do
        [ -e "/lib/systemd/system/$unit" ] || continue
        update-rc.d "${unit%.*}" disable 2>/dev/null || : # where there is no systemd
        if command -v systemctl >/dev/null; then systemctl --quiet disable "$unit" || :; fi
        if [ -d /run/systemd/system ]; then systemctl --quiet stop "$unit" || :; fi
    done
    exit $code
}
trap leave EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

if [ ! -e "$policy" ] && [ ! -L "$policy" ]; then
    printf '#!/bin/sh\n# %s\nexit 101\n' "$mark" > "$policy"
    chmod 755 "$policy"
fi

# apt-get can wait for dpkg's lock, and not for its own: a new machine may be renewing its lists, or downloading, at this very moment
for lock in /var/lib/apt/lists/lock /var/cache/apt/archives/lock; do
    timeout 300 python3 -c 'import fcntl, sys; fcntl.lockf(open(sys.argv[1], "a"), fcntl.LOCK_EX)' "$lock" || :
done

export DEBIAN_FRONTEND=noninteractive
dpkg --configure -a || : # what an earlier, interrupted installation left half-way; apt-get tells what remains
apt-get update || echo 'The package lists could not be renewed; trying with those that are here.'
apt-get install -y --no-install-recommends -o DPkg::Lock::Timeout=300 "$@"
