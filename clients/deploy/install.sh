#!/bin/sh
# Installs fl_dpgan at a site: users, folders, a Python environment in /opt/fl-dpgan, and the two services (not started).
# Run it as root, from a checkout. It may be run again, after an update too; it touches no site.toml, key or ledger.
set -eu
umask 022

here=$(cd "$(dirname "$0")" && pwd)
checkout=$(cd "$here/../.." && pwd)
opt=/opt/fl-dpgan

[ "$(id -u)" = 0 ] || { echo "error: run this as root, with sudo" >&2; exit 2; }

getent group fl-link >/dev/null || groupadd --system fl-link
for user in fl-guard fl-flower; do
    getent passwd "$user" >/dev/null || useradd --system --user-group --no-create-home \
        --home-dir /nonexistent --shell /usr/sbin/nologin "$user"
done
usermod --append --groups fl-link fl-flower

install -d -m 0711 -o fl-guard -g fl-link /var/lib/fl-dpgan
install -d -m 0700 -o fl-flower -g fl-flower /var/lib/fl-dpgan-node

[ -x "$opt/bin/python" ] || "${PYTHON:-python3}" -m venv "$opt"
for user in fl-guard fl-flower; do
    runuser -u "$user" -- "$opt/bin/python" -c "" 2>/dev/null || {
        echo "error: $user cannot run $opt/bin/python ($(readlink -f "$opt/bin/python")); remove $opt and give" \
            "another one, as in PYTHON=/usr/bin/python3 $0" >&2
        exit 2
    }
done
"$opt/bin/python" -m pip install --quiet "$checkout[dicom]"
install -d -m 0755 "$opt/clients"
install -m 0644 "$here/../README.md" "$opt/clients/README.md"
ln -sf "$opt/bin/fl-dpgan" /usr/local/bin/fl-dpgan

install -m 0644 "$here"/fl-dpgan-guard.service "$here"/fl-dpgan-node.service /etc/systemd/system/
if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi

echo "installed: $("$opt/bin/fl-dpgan" --version); next: fl-dpgan site init (clients/README.md)"
