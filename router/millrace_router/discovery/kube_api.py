"""The client of the API server: credentials, the one call, and the meaning of its errors."""

import json
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

import urllib3
from kubernetes import client
from kubernetes import config as credentials
from kubernetes.client.exceptions import ApiException
from millrace_common.config import ConfigError
from millrace_common.json_values import Json
from urllib3 import HTTPResponse

from millrace_router.config import KubernetesConfig
from millrace_router.discovery.objects import Object

OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
List = Callable[..., Json]  # kubernetes has no types


class Configuration(client.Configuration):
    """A token's file may end with a line break, which no header may; the error about it would show the token."""

    def get_api_key_with_prefix(self, identifier: str, alias: str | None = None) -> str | None:
        token = (super().get_api_key_with_prefix(identifier, alias) or "").strip()
        if not token.isprintable():
            raise ValueError("the bearer token is not one line of text")
        return token or None


def connect(config: KubernetesConfig) -> List:
    """Return the call that lists or watches the configured objects as plain JSON; typed models cost a hundred times
    more, and discovery reads few fields. Reads the credentials now, and raises when there are none.
    """
    configuration = Configuration()
    if config.api:
        configuration.host = config.api
    elif config.kubeconfig is not None:
        credentials.load_kube_config(str(config.kubeconfig), client_configuration=configuration)
    else:
        credentials.load_incluster_config(configuration)
        configuration.proxy = None  # the API server of our own cluster is behind none
    configuration.retries = False  # discovery retries itself, and reports the trouble
    api = client.ApiClient(configuration)
    if config.objects == "pods":
        method: List = client.CoreV1Api(api).list_namespaced_pod
    else:
        method = client.DiscoveryV1Api(api).list_namespaced_endpoint_slice

    def call(**options: object):  # type: ignore[no-untyped-def]  # an annotation would make Watch build models
        namespace = namespace_of(config)
        return method(namespace, label_selector=config.selector, **{"_preload_content": False, **options})

    return call


def check(config: KubernetesConfig) -> None:
    """Raises ConfigError when there are no usable credentials at the start. A server that they need may come later."""
    try:
        connect(config)
    except (ApiException, urllib3.exceptions.HTTPError):  # of a server that a plugin asks for a token
        pass
    except Exception as error:  # many kinds: the library reads what it finds without checks
        what = "is not set, and this is no pod with a service account"
        if config.kubeconfig is not None:
            what = f"{config.kubeconfig} cannot be used"
        raise ConfigError(f"discovery.kubernetes.kubeconfig: {what}: {explain(error)}") from error


def namespace_of(config: KubernetesConfig) -> str:
    if config.namespace:
        return config.namespace
    return OWN_NAMESPACE.read_text().strip() if OWN_NAMESPACE.exists() else "default"


def answer_of(response: HTTPResponse) -> Object:
    """Return the body of an answer to a list. Raises ApiException with the message of an error answer."""
    if response.status != HTTPStatus.OK:
        raise ApiException(http_resp=response)
    answer: Object = json.loads(response.data)
    return answer


def trouble(error: Exception) -> str:
    """One of base.TROUBLES."""
    if isinstance(error, ApiException):  # without a status: the client reports a TLS failure like this
        if not error.status:
            return "untrusted"
        return "gone" if error.status == HTTPStatus.GONE else "refused"
    refused = isinstance(error, urllib3.exceptions.NewConnectionError)  # which counts as a timeout there
    return "silent" if isinstance(error, urllib3.exceptions.TimeoutError) and not refused else "failed"


def explain(error: Exception) -> str:
    """Describe an error in one line. Of an error answer only the message; the rest is headers."""
    if not isinstance(error, ApiException):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    try:
        message = json.loads(error.body or "")["message"]
    except (ValueError, KeyError, TypeError):
        message = ""
    status = f"{error.status} " if error.status else ""
    return " ".join(f"{status}{error.reason}{': ' if message else ''}{message}".split())
