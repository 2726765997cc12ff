"""The nginx of a mount: its configuration, and its life.

It serves the tiers' files to the job's other nodes, read-only, and passes questions to the worker's
socket. It runs as the mount's user and touches neither the mount nor the source, so a source that
hangs cannot hang it.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarchfs.peers.credentials import signed_text

# tcp_nopush: a range that does not begin on a page waits 40 ms for an acknowledgement. Ours do.
_CONFIGURATION = """\
{user}daemon off;
master_process off;
pid "{directory}/nginx.pid";
error_log "{directory}/nginx.log" warn;
worker_rlimit_nofile 8192;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    server_tokens off;
    sendfile on;
    tcp_nopush on;
    tcp_nodelay on;
    keepalive_requests 1000000000;
    keepalive_timeout 300s;
    reset_timedout_connection on;
    send_timeout 10s;
    client_header_timeout 300s;
    client_body_timeout 10s;
    client_max_body_size 1m;
    default_type application/octet-stream;
    disable_symlinks on;
    client_body_temp_path "{directory}/body";
    proxy_temp_path "{directory}/proxy";
    fastcgi_temp_path "{directory}/fastcgi";
    uwsgi_temp_path "{directory}/uwsgi";
    scgi_temp_path "{directory}/scgi";
    server {{
        listen {listen};
{tls}        secure_link $arg_s,$arg_e;
        secure_link_md5 "{signed}";
        if ($secure_link != 1) {{ return 403; }}
        location / {{ return 404; }}
{tiers}        location /ask/ {{
            proxy_pass "http://unix:{socket}";
            proxy_request_buffering on;
            proxy_buffering off;
            proxy_read_timeout 60s;
        }}
    }}
}}
"""
_TLS = """\
        ssl_certificate "{path}";
        ssl_certificate_key "{path}";
        ssl_protocols TLSv1.3;
"""
_TIER = """\
        location /tier/{number}/ {{ alias "{directory}/"; limit_except GET {{ deny all; }} }}
"""


@dataclass(frozen=True, slots=True)
class WebServerOptions:
    """``directory``: for the server's own files; the caller makes it, for its user alone.
    ``tiers``: directories with replicas, by number. ``worker_socket``: answers below /ask/.
    ``certificate``: a private key and its certificate, in PEM; empty without TLS."""

    directory: Path
    address: str
    port: int
    tiers: Sequence[Path]
    worker_socket: Path
    secret: str
    certificate: str = ""

    @property
    def certificate_path(self) -> Path:
        return self.directory / "certificate.pem"


def find_nginx() -> str | None:
    """The path of nginx, even if /usr/sbin is not in PATH."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/sbin")


def configuration(options: WebServerOptions, *, as_root: bool = False) -> str:
    """The text of nginx.conf. ``as_root``: the server runs as root.

    Raises ValueError for a path that it cannot contain.
    """
    paths = [options.directory, options.worker_socket, *options.tiers]
    for path in map(str, paths):
        if set(path) & set("\"'\\;{}$\n") or not path.isprintable():
            raise ValueError(f"{path}: nginx's configuration cannot contain this path")
    host = f"[{options.address}]" if ":" in options.address else options.address
    return _CONFIGURATION.format(
        directory=options.directory,
        user="user root;\n" if as_root else "",  # else nginx becomes nobody
        socket=options.worker_socket,
        listen=f"{host}:{options.port}{' ssl' if options.certificate else ''}",
        tls=_TLS.format(path=options.certificate_path) if options.certificate else "",
        signed=signed_text("$secure_link_expires", "$remote_addr", "$server_addr", options.secret),
        tiers="".join(
            _TIER.format(number=number, directory=tier) for number, tier in enumerate(options.tiers)
        ),
    )


def files(options: WebServerOptions, *, as_root: bool = False) -> dict[str, str]:
    """The texts of the files that it reads, by name: the caller writes them, with the rights of its
    user, who may have put anything there."""
    found = {"nginx.conf": configuration(options, as_root=as_root)}
    if options.certificate:
        found[options.certificate_path.name] = options.certificate
    return found


def start(
    options: WebServerOptions,
    program: str,
    identity: Mapping[str, Any],
    before_exec: Callable[[], None] | None = None,
) -> subprocess.Popen[bytes]:
    """Start it as one process, with its ``files`` in its directory; SIGTERM ends it. ``identity``:
    ``user`` and similar arguments of ``subprocess.Popen``, if the mount is another user's.
    ``before_exec`` runs in the child: only a process with one thread may give one.

    Raises OSError.
    """
    return subprocess.Popen(
        [program, "-p", str(options.directory), "-e", str(options.directory / "nginx.log"),
         "-c", str(options.directory / "nginx.conf")],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, cwd="/", preexec_fn=before_exec, **identity,
    )  # fmt: skip
