#define HEADRACE_ISA kAvx512Bf16
#define HEADRACE_NAME "AVX-512 BF16"
#define HEADRACE_WIDTH 512
#define HEADRACE_BF16 1
#define HEADRACE_VNNI 1
#include "layers.h"
