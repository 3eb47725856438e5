#!/bin/sh
# Install packages on Debian or Ubuntu, as root, without any service being started, now or at the next boot.
#
# policy-rc.d is Debian's own way to forbid it: 101 means "not allowed". One that is there already belongs to somebody and
# stays as it is; ours is taken away again however this ends, and if it ends by SIGKILL, by the next run.
set -eu
policy=/usr/sbin/policy-rc.d
mark='labkit set-up: starts no service while packages are installed'

fresh=
for unit in rabbitmq-server.service epmd.service epmd.socket; do
    [ -e "/lib/systemd/system/$unit" ] || fresh="$fresh $unit"
done

leave() {
    code=$?
    trap '' INT TERM HUP
    if grep -qs "$mark" "$policy"; then rm -f "$policy"; fi
    if [ -d /run/systemd/system ]; then systemctl daemon-reload || :; fi
    for unit in $fresh; do
        [ -e "/lib/systemd/system/$unit" ] || continue
        deb-systemd-helper disable "$unit" >/dev/null || :
        if [ -d /run/systemd/system ]; then systemctl stop "$unit" || :; fi
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

export DEBIAN_FRONTEND=noninteractive
dpkg --configure -a # what an earlier, interrupted installation left half-way
apt-get update || echo 'The package lists could not be renewed; trying with those that are here.'
apt-get install -y --no-install-recommends -o DPkg::Lock::Timeout=300 "$@"
