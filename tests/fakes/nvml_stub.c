/* A small libnvidia-ml.so.1 that answers from a recorded host: the data stand in "host_data.h", made by the tests.
 *
 * A control file (NVML_STUB_CONTROL) is read again whenever it changes. Its lines:
 *   FUNCTION DEVICE CODE SECONDS   the function (or *) on the device (or -1) waits, then returns the code (0: goes on)
 *   xid DEVICE NUMBER              one Xid event
 *   counter_step KIB               every NVLink counter grows by so much with every sample (events are waited for)
 *   bytes_only                     NVLink counters are those of NVLink 5, in bytes
 *   reset DEVICE                   the GPU gets a new handle, the one before it is lost
 *   reset_with_init DEVICE         the same, and it is to be had only after the library was initialised anew
 *   holds DEVICE PID MIB           in place of the recorded processes this one holds so much (again: one more)
 *   set DEVICE NAME VALUE          a figure as NVML gives it: utilization, memory_utilization, temperature, power_mw,
 *                                  clock, throttle (bits), pcie_generation, pcie_width, pcie_sent and pcie_received
 *                                  (KB/s), energy_mj
 *   energy_by_power                energy counters grow by the recorded power
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define OK 0
#define INVALID 2
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define TOO_SMALL 7
#define TIMEOUT 10
#define LOST 15
#define NONE (-1)

typedef unsigned long long u64;
struct process { unsigned pid; u64 bytes; unsigned instance; int graphics; };
struct mig { const char *uuid, *name; u64 total, free; int gi, ci; };
struct port { int active, version, remote, is_switch; long long sent, received, errors[3]; };
struct gpu {
    int index;
    const char *uuid, *name, *bus;
    u64 total, free, used;
    int utilization, memory_utilization, temperature, power_mw, limit_mw, clock, clock_max, mclock, mclock_max;
    long long energy_mj, throttle;
    int ecc, persistence, mig_mode, architecture, major, minor, gen, gen_max, width, width_max, replays, numa;
    int slowdown, pcie_sent, pcie_received;
    u64 affinity[16];
    int has_affinity, speed, n_processes, n_migs, n_ports;
    struct process *processes;
    struct mig *migs;
    struct port *ports;
};
struct device { struct gpu *gpu; struct mig *mig; int generation; };

#include "host_data.h" /* DRIVER, CUDA, N_GPUS, gpus[], ancestors[][], p2p[][] */

#define HANDLES 8
static struct device devices[(N_GPUS + 1) * HANDLES], mig_devices[(N_GPUS + 1) * 8];
static struct gpu recorded[N_GPUS + 1];
static struct process held[N_GPUS + 1][8];
static int generations[N_GPUS + 1], waits_for_init[N_GPUS + 1];

/* --- control file ------------------------------------------------------------------------------------------------ */
struct fault { char function[64]; int device, code; double seconds; };
static struct fault faults[512];
static int n_faults, xid_device = NONE;
static u64 xid_number;
static long long counter_step;
static int bytes_only, energy_by_power;
static struct timespec control_time;
static long control_size = -1;

static int control_changed(void) {
    const char *path = getenv("NVML_STUB_CONTROL");
    struct stat now;
    if (!path || stat(path, &now)) return 0;
    if (now.st_size == control_size && now.st_mtim.tv_nsec == control_time.tv_nsec
        && now.st_mtim.tv_sec == control_time.tv_sec) return 0;
    control_time = now.st_mtim;
    control_size = now.st_size;
    return 1;
}

/* GPU number i with what the control file says of its processes: what they hold is no longer free. */
static void hold(int i, unsigned pid, u64 mib) {
    struct gpu *g = &gpus[i];
    if (g->processes != held[i]) {
        for (int p = 0; p < g->n_processes; p++) g->free += g->processes[p].bytes;
        g->processes = held[i];
        g->n_processes = 0;
    }
    if (g->n_processes < 8) held[i][g->n_processes++] = (struct process){pid, mib << 20, 0xFFFFFFFF, 0};
    g->free -= mib << 20;
    g->used = g->total - g->free;
}

static void change(int i, const char *name, long long value) {
    struct gpu *g = &gpus[i];
    struct { const char *name; int *figure; } known[] = {
        {"utilization", &g->utilization}, {"memory_utilization", &g->memory_utilization}, {"clock", &g->clock},
        {"temperature", &g->temperature}, {"power_mw", &g->power_mw}, {"pcie_generation", &g->gen},
        {"pcie_width", &g->width}, {"pcie_sent", &g->pcie_sent}, {"pcie_received", &g->pcie_received},
    };
    for (unsigned k = 0; k < sizeof known / sizeof *known; k++)
        if (!strcmp(known[k].name, name)) *known[k].figure = value;
    if (!strcmp(name, "throttle")) g->throttle = value;
    if (!strcmp(name, "energy_mj")) g->energy_mj = value;
}

static void read_control(void) {
    FILE *file = fopen(getenv("NVML_STUB_CONTROL"), "r");
    char word[64];
    int device;
    n_faults = 0;
    counter_step = bytes_only = energy_by_power = 0;
    memcpy(gpus, recorded, sizeof gpus);
    while (file && fscanf(file, "%63s", word) == 1) {
        if (!strcmp(word, "xid")) {
            if (fscanf(file, "%d %llu", &xid_device, &xid_number) != 2) break;
        } else if (!strcmp(word, "counter_step")) {
            if (fscanf(file, "%lld", &counter_step) != 1) break;
        } else if (!strcmp(word, "bytes_only")) {
            bytes_only = 1;
        } else if (!strcmp(word, "energy_by_power")) {
            energy_by_power = 1;
        } else if (!strcmp(word, "reset") || !strcmp(word, "reset_with_init")) {
            if (fscanf(file, "%d", &device) != 1) break;
            generations[device]++;
            waits_for_init[device] = !strcmp(word, "reset_with_init");
        } else if (!strcmp(word, "holds")) {
            unsigned pid;
            u64 mib;
            if (fscanf(file, "%d %u %llu", &device, &pid, &mib) != 3) break;
            hold(device, pid, mib);
        } else if (!strcmp(word, "set")) {
            char name[64];
            long long value;
            if (fscanf(file, "%d %63s %lld", &device, name, &value) != 3) break;
            change(device, name, value);
        } else {
            struct fault *fault = &faults[n_faults];
            strcpy(fault->function, word);
            if (fscanf(file, "%d %d %lf", &fault->device, &fault->code, &fault->seconds) != 3) break;
            if (n_faults < 511) n_faults++;
        }
    }
    if (file) fclose(file);
}

static int gate(const char *function, int device) {
    if (control_changed()) read_control();
    for (int i = 0; i < n_faults; i++) {
        struct fault *fault = &faults[i];
        if (strcmp(fault->function, "*") && strcmp(fault->function, function)) continue;
        if (fault->device != NONE && fault->device != device) continue;
        int code = fault->code;
        double left = fault->seconds;
        struct timespec step = {0, 10000000};
        for (; left > 0; left -= 0.01) { /* a hang ends early when the control file changes */
            nanosleep(&step, 0);
            if (control_changed()) { read_control(); return gate(function, device); }
        }
        return code;
    }
    return OK;
}

#define GATE(index) do { int code = gate(__func__, index); if (code) return code; } while (0)
#define ON(handle) struct device *d = (handle); struct gpu *g = d->gpu; (void)g; GATE(g->index); \
    if (d->generation != generations[g->index]) return LOST
#define GIVE(value) do { if ((value) == NONE) return NOT_SUPPORTED; *out = (value); return OK; } while (0)

static int text(char *out, unsigned size, const char *value) {
    if (!value) return NOT_SUPPORTED;
    if (strlen(value) >= size) return TOO_SMALL;
    strcpy(out, value);
    return OK;
}

/* --- system ------------------------------------------------------------------------------------------------------ */
int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (!recorded[0].total) memcpy(recorded, gpus, sizeof gpus);
    GATE(NONE);
    for (int i = 0; i < N_GPUS; i++) {
        waits_for_init[i] = 0;
        for (int m = 0; m < gpus[i].n_migs; m++) {
            mig_devices[i * 8 + m].gpu = &gpus[i];
            mig_devices[i * 8 + m].mig = &gpus[i].migs[m];
        }
    }
    return OK;
}
int nvmlShutdown(void) { GATE(NONE); return OK; }
const char *nvmlErrorString(int code) { (void)code; return "stub error"; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { GATE(NONE); return text(out, size, DRIVER); }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { GATE(NONE); GIVE(CUDA); }
int nvmlSystemGetCudaDriverVersion(int *out) { GATE(NONE); GIVE(CUDA); }
int nvmlDeviceGetCount_v2(unsigned *out) { GATE(NONE); *out = N_GPUS; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **out) {
    if (index >= N_GPUS) return INVALID;
    GATE((int)index);
    if (waits_for_init[index]) return LOST;
    int number = index * HANDLES + generations[index] % HANDLES;
    devices[number] = (struct device){&gpus[index], 0, generations[index]};
    *out = &devices[number];
    return OK;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, struct device **out) {
    GATE(NONE);
    for (int i = 0; i < N_GPUS; i++)
        if (gpus[i].bus && !strcmp(gpus[i].bus, bus)) return nvmlDeviceGetHandleByIndex_v2(i, out);
    return NOT_FOUND;
}

/* --- one GPU ----------------------------------------------------------------------------------------------------- */
int nvmlDeviceGetUUID(struct device *h, char *out, unsigned size) { ON(h); return text(out, size, d->mig ? d->mig->uuid : g->uuid); }
int nvmlDeviceGetName(struct device *h, char *out, unsigned size) { ON(h); return text(out, size, d->mig ? d->mig->name : g->name); }

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(struct device *h, struct pci *out) {
    ON(h);
    memset(out, 0, sizeof *out);
    return text(out->bus_id, 32, g->bus);
}
int nvmlDeviceGetCudaComputeCapability(struct device *h, int *major, int *minor) {
    ON(h);
    if (g->major == NONE) return NOT_SUPPORTED;
    *major = g->major; *minor = g->minor;
    return OK;
}
int nvmlDeviceGetArchitecture(struct device *h, unsigned *out) { ON(h); if (g->architecture == NONE) return NOT_SUPPORTED; *out = g->architecture; return OK; }
int nvmlDeviceGetCpuAffinity(struct device *h, unsigned words, u64 *out) {
    ON(h);
    if (!g->has_affinity) return NOT_SUPPORTED;
    for (unsigned i = 0; i < words; i++) out[i] = i < 16 ? g->affinity[i] : 0;
    return OK;
}
int nvmlDeviceGetMemoryAffinity(struct device *h, unsigned words, u64 *out, unsigned scope) {
    (void)scope;
    ON(h);
    if (g->numa == NONE) return NOT_SUPPORTED;
    for (unsigned i = 0; i < words; i++) out[i] = 0;
    out[g->numa / 64] = 1ULL << (g->numa % 64);
    return OK;
}
int nvmlDeviceGetMaxClockInfo(struct device *h, unsigned type, unsigned *out) { ON(h); int v = type == 2 ? g->mclock_max : g->clock_max; GIVE(v); }
int nvmlDeviceGetClockInfo(struct device *h, unsigned type, unsigned *out) { ON(h); int v = type == 2 ? g->mclock : g->clock; GIVE(v); }
int nvmlDeviceGetMaxPcieLinkGeneration(struct device *h, unsigned *out) { ON(h); GIVE(g->gen_max); }
int nvmlDeviceGetMaxPcieLinkWidth(struct device *h, unsigned *out) { ON(h); GIVE(g->width_max); }
int nvmlDeviceGetCurrPcieLinkGeneration(struct device *h, unsigned *out) { ON(h); GIVE(g->gen); }
int nvmlDeviceGetCurrPcieLinkWidth(struct device *h, unsigned *out) { ON(h); GIVE(g->width); }
int nvmlDeviceGetPcieReplayCounter(struct device *h, unsigned *out) { ON(h); GIVE(g->replays); }
int nvmlDeviceGetEccMode(struct device *h, unsigned *current, unsigned *pending) {
    ON(h);
    if (g->ecc == NONE) return NOT_SUPPORTED;
    *current = *pending = g->ecc;
    return OK;
}
int nvmlDeviceGetTotalEccErrors(struct device *h, unsigned type, unsigned counter, u64 *out) {
    (void)type; (void)counter;
    ON(h);
    if (g->ecc != 1) return NOT_SUPPORTED;
    *out = 0;
    return OK;
}
int nvmlDeviceGetPersistenceMode(struct device *h, unsigned *out) { ON(h); GIVE(g->persistence); }
int nvmlDeviceGetMigMode(struct device *h, unsigned *current, unsigned *pending) {
    ON(h);
    if (g->mig_mode == NONE) return NOT_SUPPORTED;
    *current = *pending = g->mig_mode;
    return OK;
}
int nvmlDeviceGetEnforcedPowerLimit(struct device *h, unsigned *out) { ON(h); GIVE(g->limit_mw); }
int nvmlDeviceGetTotalEnergyConsumption(struct device *h, u64 *out) {
    struct timespec now;
    ON(h);
    if (d->mig || (g->energy_mj == NONE && !energy_by_power)) return NOT_SUPPORTED;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *out = energy_by_power ? (u64)((now.tv_sec + now.tv_nsec / 1e9) * g->power_mw) : (u64)g->energy_mj;
    return OK;
}
int nvmlDeviceGetPowerUsage(struct device *h, unsigned *out) { ON(h); GIVE(g->power_mw); }

struct memory { u64 total, free, used; };
struct memory2 { unsigned version; u64 total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo(struct device *h, struct memory *out) {
    ON(h);
    if (!g->total) return NOT_SUPPORTED;
    out->total = d->mig ? d->mig->total : g->total;
    out->free = d->mig ? d->mig->free : g->free;
    out->used = d->mig ? out->total - out->free : g->used;
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(struct device *h, struct memory2 *out) {
    ON(h);
    if (out->version != 0x02000028) return 25;
    if (!g->total) return NOT_SUPPORTED;
    out->total = d->mig ? d->mig->total : g->total;
    out->free = d->mig ? d->mig->free : g->free;
    out->reserved = 0;
    out->used = d->mig ? out->total - out->free : g->used;
    return OK;
}
struct utilization { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(struct device *h, struct utilization *out) {
    ON(h);
    if (g->utilization == NONE) return NOT_SUPPORTED;
    out->gpu = g->utilization; out->memory = g->memory_utilization;
    return OK;
}
int nvmlDeviceGetTemperature(struct device *h, unsigned sensor, unsigned *out) { (void)sensor; ON(h); GIVE(g->temperature); }
struct temperature { unsigned version, sensor; int value; };
int nvmlDeviceGetTemperatureV(struct device *h, struct temperature *t) { ON(h); int *out = &t->value; GIVE(g->temperature); }
int nvmlDeviceGetTemperatureThreshold(struct device *h, unsigned which, unsigned *out) {
    ON(h);
    if (which != 1) return NOT_SUPPORTED;
    GIVE(g->slowdown);
}
struct margin { unsigned version; int value; };
int nvmlDeviceGetMarginTemperature(struct device *h, struct margin *out) {
    ON(h);
    if (g->slowdown == NONE || g->temperature == NONE) return NOT_SUPPORTED;
    out->value = g->slowdown - 2 - g->temperature; /* to the highest operating temperature, 2 below the slowdown */
    return OK;
}
int nvmlDeviceGetPcieThroughput(struct device *h, unsigned counter, unsigned *out) { ON(h); GIVE(counter ? g->pcie_received : g->pcie_sent); }
int nvmlDeviceGetCurrentClocksEventReasons(struct device *h, u64 *out) { ON(h); if (g->throttle < 0) return NOT_SUPPORTED; *out = g->throttle; return OK; }
int nvmlDeviceGetCurrentClocksThrottleReasons(struct device *h, u64 *out) { ON(h); if (g->throttle < 0) return NOT_SUPPORTED; *out = g->throttle; return OK; }

/* --- processes --------------------------------------------------------------------------------------------------- */
struct process_info { unsigned pid; u64 bytes; unsigned gpu_instance, compute_instance; };
static int processes(struct gpu *g, int graphics, unsigned *count, struct process_info *out) {
    unsigned n = 0;
    if (g->n_processes == NONE) return NOT_SUPPORTED;
    for (int i = 0; i < g->n_processes; i++) n += g->processes[i].graphics == graphics;
    if (*count < n) { *count = n; return TOO_SMALL; }
    *count = 0;
    for (int i = 0; i < g->n_processes; i++) {
        struct process *p = &g->processes[i];
        if (p->graphics == graphics)
            out[(*count)++] = (struct process_info){p->pid, p->bytes, p->instance, 0xFFFFFFFF};
    }
    return OK;
}
#define PROCESSES(name, graphics) \
    int name(struct device *h, unsigned *count, struct process_info *out) { ON(h); return processes(g, graphics, count, out); }
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, 0)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, 0)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, 1)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, 1)

/* --- MIG --------------------------------------------------------------------------------------------------------- */
int nvmlDeviceGetMaxMigDeviceCount(struct device *h, unsigned *out) { ON(h); *out = g->mig_mode == 1 ? 7 : 0; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(struct device *h, unsigned index, struct device **out) {
    ON(h);
    if ((int)index >= g->n_migs) return NOT_FOUND;
    *out = &mig_devices[(g - gpus) * 8 + index];
    (*out)->generation = d->generation;
    return OK;
}
int nvmlDeviceGetGpuInstanceId(struct device *h, unsigned *out) { ON(h); if (!d->mig) return NOT_SUPPORTED; *out = d->mig->gi; return OK; }
int nvmlDeviceGetComputeInstanceId(struct device *h, unsigned *out) { ON(h); if (!d->mig) return NOT_SUPPORTED; *out = d->mig->ci; return OK; }

/* --- NVLink ------------------------------------------------------------------------------------------------------ */
#define PORT(h, link) ON(h); if ((int)(link) >= g->n_ports) return INVALID; struct port *p = &g->ports[link]
int nvmlDeviceGetNvLinkState(struct device *h, unsigned link, unsigned *out) { PORT(h, link); *out = p->active; return OK; }
int nvmlDeviceGetNvLinkVersion(struct device *h, unsigned link, unsigned *out) { PORT(h, link); GIVE(p->version); }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(struct device *h, unsigned link, struct pci *out) {
    PORT(h, link);
    memset(out, 0, sizeof *out);
    if (p->remote == NONE) { strcpy(out->bus_id, "00000000:F0:00.0"); return OK; }
    return text(out->bus_id, 32, gpus[p->remote].bus);
}
int nvmlDeviceGetNvLinkRemoteDeviceType(struct device *h, unsigned link, unsigned *out) { PORT(h, link); *out = p->is_switch ? 2 : 0; return OK; }
int nvmlDeviceGetNvLinkErrorCounter(struct device *h, unsigned link, unsigned which, u64 *out) {
    PORT(h, link);
    if (which > 2) return NOT_SUPPORTED;
    *out = p->errors[which];
    return OK;
}
static int looks;
struct field { uint32_t id, scope; int64_t at, latency; unsigned type, code; union { double d; unsigned ui; int si; u64 ull; } value; };
int nvmlDeviceGetFieldValues(struct device *h, int count, struct field *out) {
    ON(h);
    for (int i = 0; i < count; i++) {
        struct field *f = &out[i];
        f->code = OK;
        f->type = 1;
        if (f->id == 91 && g->n_ports) f->value.ui = g->n_ports;
        else if (f->id == 90 && g->speed != NONE) f->value.ui = g->speed;
        else if (f->id == 194 && g->slowdown != NONE) { f->type = 5; f->value.si = -2; }
        else if ((bytes_only ? f->id == 202 || f->id == 204 : f->id == 138 || f->id == 139) && (int)f->scope < g->n_ports) {
            struct port *p = &g->ports[f->scope];
            f->type = 3;
            f->value.ull = (f->id == 138 || f->id == 202 ? p->sent : p->received) + counter_step * looks;
            if (bytes_only) f->value.ull *= 1024;
        } else f->code = NOT_SUPPORTED;
    }
    return OK;
}

/* --- pairs ------------------------------------------------------------------------------------------------------- */
int nvmlDeviceGetTopologyCommonAncestor(struct device *h, struct device *other, unsigned *out) {
    ON(h);
    int level = ancestors[g - gpus][other->gpu - gpus];
    GIVE(level);
}
int nvmlDeviceGetP2PStatus(struct device *h, struct device *other, unsigned which, unsigned *out) {
    ON(h);
    int status = p2p[g - gpus][other->gpu - gpus];
    if (which == 2) { /* over NVLink */
        status = NOT_SUPPORTED + 2;
        for (int i = 0; i < g->n_ports; i++)
            if (g->ports[i].active && (g->ports[i].is_switch || g->ports[i].remote == other->gpu->index)) status = OK;
    }
    GIVE(status);
}

/* --- events ------------------------------------------------------------------------------------------------------ */
struct event { struct device *device; u64 type, data; unsigned gi, ci; };
int nvmlEventSetCreate(void **out) { GATE(NONE); *out = devices; return OK; }
static int listens[N_GPUS + 1]; /* generation that is listened to, plus one */
int nvmlDeviceRegisterEvents(struct device *h, u64 types, void *set) {
    (void)types; (void)set;
    ON(h);
    listens[g->index] = d->generation + 1;
    return OK;
}
int nvmlEventSetFree(void *set) { (void)set; GATE(NONE); return OK; }
int nvmlEventSetWait_v2(void *set, struct event *out, unsigned timeout) {
    (void)set; (void)timeout;
    GATE(NONE);
    looks++;
    if (xid_device == NONE || listens[xid_device] != generations[xid_device] + 1) return TIMEOUT;
    *out = (struct event){&devices[xid_device * HANDLES + generations[xid_device] % HANDLES], 8, xid_number, 0, 0};
    xid_device = NONE;
    return OK;
}
