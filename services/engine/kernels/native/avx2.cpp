#define HEADRACE_ISA kAvx2
#define HEADRACE_NAME "AVX2"
#define HEADRACE_WIDTH 256
#define HEADRACE_BF16 0
#define HEADRACE_VNNI 0
#include "layers.h"
