"""Sign statements with sigstore, and check such signatures: attestations as PEP 740 has them.

Sigstore is asked for by ``--sign`` alone: it writes who signed into a public log.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from scripts.base import files
from scripts.base.errors import ToolchainError, UsageError, WheelError

if TYPE_CHECKING:
    from pathlib import Path

    from cryptography.x509 import Certificate
    from pypi_attestations import Attestation
    from sigstore.oidc import IdentityToken


def sign(statement: Path, attestation: Path) -> None:
    """Sign the bytes of a statement by the identity of this machine's surroundings, or of the person here.

    Raises:
        UsageError: there is no identity, or no network to sigstore's services.
        ToolchainError: the libraries are not installed.
    """
    _require()
    from pypi_attestations import Attestation  # noqa: PLC0415 - of the dependency group "signing"
    from sigstore.dsse import Statement  # noqa: PLC0415
    from sigstore.models import ClientTrustConfig  # noqa: PLC0415
    from sigstore.sign import SigningContext  # noqa: PLC0415

    try:
        config = ClientTrustConfig.production()
        context = SigningContext.from_trust_config(config)
        with context.signer(_identity(config.signing_config.get_oidc_url())) as signer:
            bundle = signer.sign_dsse(Statement(statement.read_bytes()))
        signed = Attestation.from_bundle(bundle)
    except UsageError:
        raise
    except Exception as e:
        raise UsageError(
            f"--sign: {statement.name} was not signed: {_reason(e)}. Signing needs sigstore's services "
            "over the network; without --sign nothing is signed."
        ) from e
    files.write(attestation, signed.model_dump_json() + "\n")


def _identity(issuer: str) -> IdentityToken:
    """Who signs: what CI says of itself, or the person who logs in."""
    import sys  # noqa: PLC0415

    from sigstore.oidc import IdentityToken, Issuer, detect_credential  # noqa: PLC0415

    if token := detect_credential():
        return IdentityToken(token)
    if not sys.stdin.isatty():
        raise UsageError(
            "--sign: nobody is here to sign: no CI with an identity (GitHub Actions: permissions: "
            "id-token: write), and no terminal to log in from. Without --sign nothing is signed."
        )
    return Issuer(issuer).identity_token()


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause, which says most."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def _require() -> None:
    """Say which libraries are missing, by how to install them.

    Raises:
        ToolchainError: they are.
    """
    try:
        import pypi_attestations  # noqa: F401, PLC0415
        import sigstore  # noqa: F401, PLC0415
    except ImportError as e:
        raise ToolchainError(
            f"{e.name} is not installed: run this through nox, or pip install --group signing."
        ) from e


def check(attestation: Path, statement: bytes) -> str:
    """Check a signed statement without a network, against the keys that sigstore's library brings.

    Args:
        attestation: the file.
        statement: what must have been signed.

    Returns:
        Who signed, and by whose word: ``name (issuer)``.

    Raises:
        WheelError: the file is damaged, or another statement's, or not signed by such a key.
    """
    _require()
    from pydantic import ValidationError  # noqa: PLC0415
    from pypi_attestations import Attestation  # noqa: PLC0415

    content = attestation.read_bytes()
    try:
        signed = Attestation.model_validate_json(content)
    except ValidationError as e:
        raise WheelError(f"{attestation} is damaged: {e.errors()[0]['msg']}; sign the wheel again.") from None
    if (signed.model_dump_json() + "\n").encode() != content:
        raise WheelError(f"{attestation} was changed since it was signed; sign the wheel again.")
    if signed.envelope.statement != statement:
        raise WheelError(
            f"{attestation} is of another wheel or proof than the one beside it; sign this one, or delete it."
        )
    return _signer(attestation, signed)


class _Anyone:
    """The policy of a check that tells who signed: the reader judges the name."""

    def verify(self, cert: Certificate) -> None:
        """Take any certificate whose chain holds."""


def _signer(attestation: Path, signed: Attestation) -> str:
    """Who signed, once the signature holds."""
    from cryptography import x509  # noqa: PLC0415
    from sigstore.verify import Verifier  # noqa: PLC0415

    logging.getLogger("sigstore").setLevel(logging.ERROR)  # it warns that it is offline, as is meant
    try:
        Verifier.production(offline=True).verify_dsse(signed.to_bundle(), _Anyone())
        certificate = x509.load_der_x509_certificate(signed.verification_material.certificate)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        issuer = signed.certificate_claims.get("1.3.6.1.4.1.57264.1.8", "issuer unknown")
    except Exception as e:
        raise WheelError(f"{attestation}: its signature does not hold: {_reason(e)}.") from e
    return f"{', '.join(str(name.value) for name in names)} ({issuer})"
