#define HEADRACE_ISA kAvx512
#define HEADRACE_NAME "AVX-512"
#define HEADRACE_WIDTH 512
#define HEADRACE_BF16 0
#define HEADRACE_VNNI 0
#include "layers.h"
