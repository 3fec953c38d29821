from millrace_testing import triton_interpreter

triton_interpreter.install()
