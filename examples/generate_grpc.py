"""One streamed prompt over gRPC, with the stubs of the package. Start a system first: `make serve`."""

import os

import grpc
from millrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc

request = inference_pb2.GenerateRequest(
    prompt=inference_pb2.Prompt(
        chat=inference_pb2.ChatPrompt(
            messages=[inference_pb2.ChatMessage(role="user", content="Sort these numbers: 42 17 88 63 29")]
        )
    ),
    sampling=common_pb2.SamplingParams(temperature=0.0, max_tokens=32),
)
with grpc.insecure_channel(os.environ.get("MILLRACE_GRPC", "127.0.0.1:50051")) as channel:
    for response in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60):
        print(response.text, end="", flush=True)
print()
