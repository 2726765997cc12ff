from tests.layers.conftest import pytest_pyfunc_call as pytest_pyfunc_call
