/* A stand-in for NVIDIA's driver library, driven by a text file.
 *
 * Built by driver.py beside it into libnvidia-ml.so.1, so that the real pynvml and its ctypes calls are what reads it.
 * The file is named by FAKE_NVML and read anew when it was replaced, so a drill can change it at any moment. One `key value` a
 * line; keys of GPU 0 begin with `0.`, of its MIG instance in place 1 with `0.1.`. What has no key is not supported.
 *
 *   driver 580.65.06          count 2              init_error 18
 *   0.uuid GPU-...            0.name NVIDIA H100   0.pci 00000000:1A:00.0
 *   0.power 61234             0.field.82 49        0.gpm.5 42.5
 *   0.error.FUNCTION 3        error.FUNCTION 15    hang.FUNCTION 5000 (milliseconds); FUNCTION or `all`
 *   event 0 79                (delivered once each, in order; lines are only ever appended)
 *
 * FAKE_NVML_CALLS names a file that gets a line for each call. Layouts of structures are those of nvml.h.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SUCCESS 0
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7
#define TIMEOUT 10
#define MOST 16

typedef struct { int gpu, instance; } device;
static device gpus[MOST], parts[MOST][MOST];
static int delivered;

/* The file's text, read anew when the file has been replaced. */
static const char *scenario(void) {
    static char *text;
    static struct stat seen;
    struct stat now;
    const char *path = getenv("FAKE_NVML");
    FILE *file;
    size_t length = 0;
    if (!path || stat(path, &now)) return "";
    if (text && now.st_ino == seen.st_ino && now.st_mtim.tv_sec == seen.st_mtim.tv_sec
        && now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)
        return text;
    file = fopen(path, "r");
    if (!file) return "";
    fstat(fileno(file), &seen);
    text = realloc(text, (size_t)seen.st_size + 1);
    length = fread(text, 1, (size_t)seen.st_size, file);
    text[length] = 0;
    fclose(file);
    return text;
}

static int look_up(const char *key, char *value, size_t size) {
    const char *line = scenario();
    size_t length = strlen(key);
    int found = 0;
    while (line && *line) {
        const char *end = strchr(line, '\n');
        if (!strncmp(line, key, length) && line[length] == ' ') {
            snprintf(value, size, "%.*s", (int)(end - line - (long)length - 1), line + length + 1);
            found = 1;
        }
        line = end ? end + 1 : NULL;
    }
    return found;
}

static int number(const char *key, double *value) {
    char text[512];
    if (!look_up(key, text, sizeof text)) return 0;
    *value = strtod(text, NULL);
    return 1;
}

static int whole(const char *key, unsigned long long *value) {
    char text[512];
    if (!look_up(key, text, sizeof text)) return 0;
    *value = strtoull(text, NULL, 0);
    return 1;
}

static char *key_of(const device *d, const char *name) {
    static char key[256];
    if (!d) snprintf(key, sizeof key, "%s", name);
    else if (d->instance < 0) snprintf(key, sizeof key, "%d.%s", d->gpu, name);
    else snprintf(key, sizeof key, "%d.%d.%s", d->gpu, d->instance, name);
    return key;
}

/* What every call does first: tell of itself, hang if asked to, fail if asked to. */
static int begin(const char *function, const device *d) {
    char name[128];
    unsigned long long value;
    const char *calls = getenv("FAKE_NVML_CALLS");
    if (calls) {
        FILE *file = fopen(calls, "a");
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (file) { fprintf(file, "%ld.%09ld %s\n", (long)now.tv_sec, now.tv_nsec, function); fclose(file); }
    }
    snprintf(name, sizeof name, "hang.%s", function);
    if (whole(name, &value)) {
        /* Not to be interrupted by a signal, like a call that sits in the kernel. */
        struct timespec left = {value / 1000, (value % 1000) * 1000000L};
        while (nanosleep(&left, &left)) {}
    }
    snprintf(name, sizeof name, "error.%s", function);
    if (whole(name, &value) || whole("error.all", &value)) return (int)value;
    if (d && whole(key_of(d, name), &value)) return (int)value;
    if (d && whole(key_of(d, "error.all"), &value)) return (int)value;
    return SUCCESS;
}

#define BEGIN(d) do { int code = begin(__func__, d); if (code) return code; } while (0)

static int text_of(const device *d, const char *name, char *out, unsigned size) {
    char value[512], *at;
    if (!look_up(key_of(d, name), value, sizeof value)) return NOT_SUPPORTED;
    for (at = value; *at; at++) /* \xf8 for bytes that no text file should hold. */
        if (at[0] == '\\' && at[1] == 'x') {
            char hex[3] = {at[2], at[3], 0};
            *at = (char)strtol(hex, NULL, 16);
            memmove(at + 1, at + 4, strlen(at + 4) + 1);
        }
    snprintf(out, size, "%s", value);
    return SUCCESS;
}

static int unsigned_of(const device *d, const char *name, unsigned *out) {
    unsigned long long value;
    if (!whole(key_of(d, name), &value)) return NOT_SUPPORTED;
    *out = (unsigned)value;
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
    unsigned long long code;
    int g, i;
    (void)flags;
    for (g = 0; g < MOST; g++) {
        gpus[g] = (device){g, -1};
        for (i = 0; i < MOST; i++) parts[g][i] = (device){g, i};
    }
    BEGIN(NULL);
    return whole("init_error", &code) ? (int)code : SUCCESS;
}
int nvmlShutdown(void) { BEGIN(NULL); return SUCCESS; }
const char *nvmlErrorString(int code) { static char text[32]; snprintf(text, 32, "error %d", code); return text; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { BEGIN(NULL); return text_of(NULL, "driver", out, size); }
int nvmlDeviceGetCount_v2(unsigned *out) { BEGIN(NULL); return unsigned_of(NULL, "count", out); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **out) {
    BEGIN(&gpus[index]);
    *out = &gpus[index];
    return SUCCESS;
}
int nvmlDeviceGetUUID(device *d, char *out, unsigned size) { BEGIN(d); return text_of(d, "uuid", out, size); }
int nvmlDeviceGetName(device *d, char *out, unsigned size) { BEGIN(d); return text_of(d, "name", out, size); }
typedef struct { char old[16]; unsigned part[5]; char bus[32]; } pci_info;
int nvmlDeviceGetPciInfo_v3(device *d, pci_info *out) {
    BEGIN(d);
    memset(out, 0, sizeof *out);
    return text_of(d, "pci", out->bus, sizeof out->bus);
}
int nvmlDeviceGetClockInfo(device *d, unsigned type, unsigned *out) {
    char name[32];
    BEGIN(d);
    snprintf(name, sizeof name, "clock.%u", type);
    return unsigned_of(d, name, out);
}
int nvmlDeviceGetTemperature(device *d, unsigned sensor, unsigned *out) {
    (void)sensor;
    BEGIN(d);
    return unsigned_of(d, "temp", out);
}
int nvmlDeviceGetPowerUsage(device *d, unsigned *out) { BEGIN(d); return unsigned_of(d, "power", out); }
int nvmlDeviceGetPcieReplayCounter(device *d, unsigned *out) { BEGIN(d); return unsigned_of(d, "replay", out); }
int nvmlDeviceGetUtilizationRates(device *d, unsigned *out) {
    BEGIN(d);
    return unsigned_of(d, "util", &out[0]) || unsigned_of(d, "memory_util", &out[1]) ? NOT_SUPPORTED : SUCCESS;
}
int nvmlDeviceGetEncoderUtilization(device *d, unsigned *out, unsigned *period) {
    BEGIN(d);
    *period = 1000000;
    return unsigned_of(d, "encoder", out);
}
int nvmlDeviceGetDecoderUtilization(device *d, unsigned *out, unsigned *period) {
    BEGIN(d);
    *period = 1000000;
    return unsigned_of(d, "decoder", out);
}
int nvmlDeviceGetMemoryInfo(device *d, unsigned long long *out) {
    unsigned long long total = 0, used = 0, reserved = 0;
    BEGIN(d);
    if (!whole(key_of(d, "memory.total"), &total)) return NOT_SUPPORTED;
    whole(key_of(d, "memory.used"), &used);
    whole(key_of(d, "memory.reserved"), &reserved);
    out[0] = total;
    out[1] = total - used - reserved;
    out[2] = used + reserved; /* The old call counts the driver's own as used. */
    return SUCCESS;
}
#ifndef OLD_DRIVER
typedef struct { unsigned version; unsigned long long part[4]; } memory_v2;
int nvmlDeviceGetMemoryInfo_v2(device *d, memory_v2 *out) {
    unsigned long long total = 0, used = 0, reserved = 0;
    BEGIN(d);
    if (out->version != 0x02000028) return 25;
    if (!whole(key_of(d, "memory.total"), &total)) return NOT_SUPPORTED;
    whole(key_of(d, "memory.used"), &used);
    whole(key_of(d, "memory.reserved"), &reserved);
    out->part[0] = total;
    out->part[1] = reserved;
    out->part[2] = total - used - reserved;
    out->part[3] = used;
    return SUCCESS;
}
int nvmlDeviceGetCurrentClocksEventReasons(device *d, unsigned long long *out) {
    BEGIN(d);
    return whole(key_of(d, "clock_events"), out) ? SUCCESS : NOT_SUPPORTED;
}
#endif
int nvmlDeviceGetCurrentClocksThrottleReasons(device *d, unsigned long long *out) {
    BEGIN(d);
    return whole(key_of(d, "clock_events"), out) ? SUCCESS : NOT_SUPPORTED;
}
typedef struct {
    unsigned field, scope; int64_t timestamp, latency; unsigned type; int code; unsigned long long value;
} field_value;
int nvmlDeviceGetFieldValues(device *d, int count, field_value *out) {
    int i;
    char name[32];
    BEGIN(d);
    for (i = 0; i < count; i++) {
        snprintf(name, sizeof name, "field.%u", out[i].field);
        /* Throughput and data-link errors are of one link, unless one asks for all. */
        if (((out[i].field >= 138 && out[i].field <= 141) || (out[i].field >= 161 && out[i].field <= 163))
            && out[i].scope != 0xFFFFFFFFu)
            snprintf(name, sizeof name, "field.%u.%u", out[i].field, out[i].scope);
        out[i].type = 3; /* unsigned long long */
        out[i].code = whole(key_of(d, name), &out[i].value) ? SUCCESS : NOT_SUPPORTED;
    }
    return SUCCESS;
}

int nvmlDeviceGetMigMode(device *d, unsigned *now, unsigned *pending) {
    BEGIN(d);
    *pending = 0;
    return unsigned_of(d, "mig", now);
}
int nvmlDeviceGetMaxMigDeviceCount(device *d, unsigned *out) { BEGIN(d); *out = 7; return SUCCESS; }
int nvmlDeviceGetMigDeviceHandleByIndex(device *d, unsigned place, device **out) {
    unsigned id;
    BEGIN(d);
    *out = &parts[d->gpu][place];
    return unsigned_of(*out, "id", &id) ? NOT_FOUND : SUCCESS;
}
int nvmlDeviceGetGpuInstanceId(device *d, unsigned *out) { BEGIN(d); return unsigned_of(d, "id", out); }

int nvmlEventSetCreate(void **out) { BEGIN(NULL); *out = &delivered; return SUCCESS; }
int nvmlEventSetFree(void *set) { (void)set; BEGIN(NULL); return SUCCESS; }
int nvmlDeviceGetSupportedEventTypes(device *d, unsigned long long *out) {
    BEGIN(d);
    return whole(key_of(d, "events"), out) ? SUCCESS : NOT_SUPPORTED;
}
int nvmlDeviceRegisterEvents(device *d, unsigned long long types, void *set) {
    (void)types; (void)set;
    BEGIN(d);
    return SUCCESS;
}
typedef struct {
    device *d; unsigned long long type, data; unsigned gpu_instance, compute_instance;
} event_data;
int nvmlEventSetWait_v2(void *set, event_data *out, unsigned milliseconds) {
    unsigned waited = 0;
    (void)set;
    BEGIN(NULL);
    for (;;) {
        const char *line = scenario();
        int number_of_event = 0, gpu, code;
        for (; line && *line; line = strchr(line, '\n'), line = line ? line + 1 : NULL)
            if (sscanf(line, "event %d %d", &gpu, &code) == 2 && number_of_event++ == delivered) {
                delivered++;
                memset(out, 0, sizeof *out);
                out->d = &gpus[gpu];
                out->type = 8;
                out->data = (unsigned long long)code;
                return SUCCESS;
            }
        if (waited >= milliseconds) return TIMEOUT;
        usleep(5000);
        waited += 5;
    }
}

int nvmlGpmQueryDeviceSupport(device *d, unsigned *out) {
    unsigned long long value = 0;
    BEGIN(d);
    whole(key_of(d, "gpm"), &value);
    out[1] = (unsigned)value;
    return SUCCESS;
}
int nvmlGpmSampleAlloc(void **out) { BEGIN(NULL); *out = calloc(1, sizeof(device *)); return SUCCESS; }
int nvmlGpmSampleFree(void *sample) { BEGIN(NULL); free(sample); return SUCCESS; }
int nvmlGpmSampleGet(device *d, device **sample) { BEGIN(d); *sample = d; return SUCCESS; }
int nvmlGpmMigSampleGet(device *d, unsigned id, device **sample) {
    int i;
    BEGIN(d);
    for (i = 0; i < MOST; i++) {
        unsigned found;
        if (!unsigned_of(&parts[d->gpu][i], "id", &found) && found == id) *sample = &parts[d->gpu][i];
    }
    return SUCCESS;
}
typedef struct { unsigned id; int code; double value; const char *info[3]; } gpm_metric;
typedef struct { unsigned version, count; device **first, **second; gpm_metric metric[]; } gpm_metrics;
int nvmlGpmMetricsGet(gpm_metrics *out) {
    unsigned i;
    char name[32];
    BEGIN(*out->second);
    if (!*out->first || !*out->second) return 2;
    for (i = 0; i < out->count; i++) {
        snprintf(name, sizeof name, "gpm.%u", out->metric[i].id);
        out->metric[i].code = number(key_of(*out->second, name), &out->metric[i].value) ? SUCCESS : NOT_SUPPORTED;
    }
    return SUCCESS;
}

typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } process;
int nvmlDeviceGetComputeRunningProcesses_v3(device *d, unsigned *count, process *out) {
    char text[512], *at = text, *one;
    unsigned room = *count, found = 0;
    BEGIN(d);
    if (!look_up(key_of(d, "pids"), text, sizeof text)) { *count = 0; return SUCCESS; }
    while ((one = strtok(at, " "))) {
        at = NULL;
        if (out && found < room) { out[found].pid = (unsigned)atoi(one); out[found].memory = 0; }
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}
