"""What trio and prometheus_client name when they are imported. This Python has no TLS, which
monarchfs leaves to nginx and libcurl: whoever wants to use it here gets an OSError."""

PROTOCOL_TLS_CLIENT = 16
PROTOCOL_TLS_SERVER = 17
CERT_NONE = 0
CERT_REQUIRED = 2


class SSLError(OSError):
    pass


class SSLEOFError(SSLError):
    pass


class SSLSyscallError(SSLError):
    pass


class SSLWantReadError(SSLError):
    pass


class SSLWantWriteError(SSLError):
    pass


class CertificateError(SSLError):
    pass


class TLSVersion:
    pass


def _refuse(*_arguments: object, **_options: object) -> None:
    raise SSLError("this Python was built without TLS")


class SSLContext:
    __init__ = _refuse


class MemoryBIO:
    __init__ = _refuse


create_default_context = _refuse
