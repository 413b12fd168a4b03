"""`python -m llamarl.cluster.certificates DIR NAME...` makes an authority and a certificate.

NAME is a host name or IP address; the one certificate is for all of them, so copy its files to
every host. A lasting cluster has an authority of its own, and a certificate per host: any that
`openssl verify` accepts, with the host's name or address as subjectAltName, for both serverAuth and
clientAuth, will do. Only their owner can read the keys."""

import argparse
import shutil
import subprocess
import sys
from ipaddress import ip_address
from pathlib import Path

NUM_DAYS = 30
CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
CA, CERTIFICATE, PRIVATE_KEY = "ca.pem", "certificate.pem", "private_key.pem"


def make_certificates(folder: str, names: list[str]) -> None:
    """Write ca.pem, certificate.pem and private_key.pem into `folder`; the authority's key is not
    kept. RuntimeError without the openssl program, or with its words if it fails."""
    if shutil.which("openssl") is None:
        raise RuntimeError("the openssl program must be installed to make certificates")
    Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    days, authority_key, request = str(NUM_DAYS), "ca_key.pem", "request.pem"
    extensions = Path(folder, "extensions")
    extensions.write_text(
        f"subjectAltName={','.join(map(_alternative_name, names))}\n"
        "basicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth,clientAuth\n"
    )
    _openssl(folder, "req", "-x509", *CURVE, "-days", days, "-subj", "/CN=llamarl authority",
             "-addext", "basicConstraints=critical,CA:TRUE",
             "-addext", "keyUsage=critical,keyCertSign",
             "-keyout", authority_key, "-out", CA)  # fmt: skip
    _openssl(folder, "req", *CURVE, "-subj", "/CN=llamarl", "-keyout", PRIVATE_KEY, "-out", request)
    _openssl(folder, "x509", "-req", "-in", request, "-CA", CA, "-CAkey", authority_key,
             "-set_serial", "1", "-days", days, "-extfile", extensions.name,
             "-out", CERTIFICATE)  # fmt: skip
    for name in (authority_key, request, extensions.name):
        Path(folder, name).unlink()


def main(arguments: list[str]) -> None:
    """Run the command that the module's docstring shows."""
    parser = argparse.ArgumentParser("python -m llamarl.cluster.certificates")
    parser.add_argument("folder", help=f"gets {CA}, {CERTIFICATE}, {PRIVATE_KEY}")
    parser.add_argument("names", nargs="+", help="host names and IP addresses of all hosts")
    options = parser.parse_args(arguments)
    try:
        make_certificates(options.folder, options.names)
    except (OSError, RuntimeError) as error:
        sys.exit(f"llamarl: {error}")


def _openssl(folder: str, *arguments: str) -> None:
    command = ["openssl", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, umask=0o077)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")


def _alternative_name(name: str) -> str:
    try:
        return f"IP:{ip_address(name)}"
    except ValueError:
        return f"DNS:{name}"


if __name__ == "__main__":
    main(sys.argv[1:])
