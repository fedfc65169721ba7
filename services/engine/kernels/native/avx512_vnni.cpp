#define HEADRACE_ISA kAvx512Vnni
#define HEADRACE_NAME "AVX-512 VNNI"
#define HEADRACE_WIDTH 512
#define HEADRACE_BF16 0
#define HEADRACE_VNNI 1
#include "layers.h"
