import java.io.BufferedOutputStream;
import java.io.PrintStream;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.locks.LockSupport;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import java.util.stream.Stream;
import org.redisson.Redisson;
import org.redisson.RedissonRedLock;
import org.redisson.api.RLock;
import org.redisson.api.RPermitExpirableSemaphore;
import org.redisson.api.RReadWriteLock;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/** Contenders, each in a thread: `src/contender.rs`. */
public class Contenders {
    /** The instants of a section in nanoseconds, 1 for a writer beside readers, and its keys. */
    record Section(long called, long start, long end, long released, int token, int[] keys) {
    }

    /** A lock that is held: its release, and 1 for a writer beside readers. */
    record Held(Runnable release, int token) {
    }

    /** As in `src/share_lock.rs`. */
    static final int WRITERS = 5, LEASE_SECONDS = 5;

    public static void main(String[] arguments) throws Exception {
        boolean isGroup = arguments[0].equals("Redisson, one group");
        boolean isFree = arguments[0].equals("Redisson, free keys");
        String redis = arguments[1];
        int count = Integer.parseInt(arguments[2]);
        int clientCount = Integer.parseInt(arguments[3]);
        int keys = Integer.parseInt(arguments[4]);
        int together = Integer.parseInt(arguments[5]);
        int sectionMillis = Integer.parseInt(arguments[6]);
        int permits = arguments[0].endsWith(" permits") ? Integer.parseInt(arguments[0].split(" ")[1]) : 0;
        boolean isShared = permits > 0 || arguments[0].endsWith(" writers");
        // A client for each server of Redlock.
        List<List<RedissonClient>> clients = new ArrayList<>();
        for (int number = 0; number < clientCount; number++) {
            clients.add(connect(redis, clientCount < count || isFree || isShared));
        }
        if (permits > 0) {
            for (int key = 0; key < keys; key++) {
                clients.get(0).get(0).getPermitExpirableSemaphore("order:" + key).trySetPermits(permits);
            }
        }
        AtomicBoolean isStopped = new AtomicBoolean();
        List<List<Section>> sections = new ArrayList<>();
        List<Thread> contenders = new ArrayList<>();
        for (int number = 0; number < count; number++) {
            List<RedissonClient> client = clients.get(number % clientCount);
            List<Section> own = new ArrayList<>();
            sections.add(own);
            Thread contender = new Thread(() -> {
                while (!isStopped.get()) {
                    int[] chosen = ThreadLocalRandom.current().ints(0, keys).distinct().limit(together).sorted().toArray();
                    long called = System.nanoTime();
                    Held held = isShared ? share(client.get(0), chosen[0], permits > 0)
                        : alone(lock(client, chosen, keys == 1 || isFree, isGroup));
                    long start = System.nanoTime();
                    sleep(sectionMillis);
                    long end = System.nanoTime();
                    held.release().run();
                    own.add(new Section(called, start, end, System.nanoTime(), held.token(), chosen));
                }
            });
            contender.start();
            contenders.add(contender);
        }
        // The virtual machine compiles what runs often.
        Thread.sleep(2500);
        System.out.println("ready");
        while (System.in.read() >= 0) {
        }
        isStopped.set(true);
        for (Thread contender : contenders) {
            contender.join(10_000);
        }
        PrintStream output = new PrintStream(new BufferedOutputStream(System.out));
        for (int number = 0; number < count; number++) {
            for (Section section : sections.get(number)) {
                output.print(number + " " + section.called + " " + section.start + " " + section.end + " " + section.released + " " + section.token);
                for (int key : section.keys) {
                    output.print(" " + key);
                }
                output.println();
            }
        }
        output.flush();
        Runtime.getRuntime().halt(0);
    }

    static List<RedissonClient> connect(String redis, boolean isShared) {
        String[] parts = redis.split("://");
        String[] servers = Stream.of(parts[1].split(",")).map(server -> "redis://" + server).toArray(String[]::new);
        if (parts[0].equals("redis+cluster")) {
            Config config = new Config();
            config.useClusterServers().addNodeAddress(servers);
            return List.of(Redisson.create(config));
        }
        return Stream.of(servers).map(server -> connectOne(server, isShared)).collect(Collectors.toList());
    }

    static RedissonClient connectOne(String redis, boolean isShared) {
        Config config = new Config();
        if (isShared) {
            config.useSingleServer().setAddress(redis);
        } else {
            // As few threads and connections as a client can have.
            config.setThreads(2).setNettyThreads(2);
            config.useSingleServer().setAddress(redis)
                .setConnectionMinimumIdleSize(1).setConnectionPoolSize(4)
                .setSubscriptionConnectionMinimumIdleSize(1).setSubscriptionConnectionPoolSize(2);
        }
        return Redisson.create(config);
    }

    static Held alone(RLock lock) {
        lock.lock();
        return new Held(() -> unlock(lock), 0);
    }

    /** A permit, or a read or write lock of readers and writers. */
    static Held share(RedissonClient client, int key, boolean isPermit) {
        if (isPermit) {
            RPermitExpirableSemaphore semaphore = client.getPermitExpirableSemaphore("order:" + key);
            try {
                String id = semaphore.acquire(LEASE_SECONDS, TimeUnit.SECONDS);
                return new Held(() -> semaphore.release(id), 0);
            } catch (InterruptedException error) {
                throw new IllegalStateException(error);
            }
        }
        RReadWriteLock lock = client.getReadWriteLock("order:" + key);
        boolean isWriter = ThreadLocalRandom.current().nextInt(100) < WRITERS;
        RLock part = isWriter ? lock.writeLock() : lock.readLock();
        part.lock();
        return new Held(part::unlock, isWriter ? 1 : 0);
    }

    @SuppressWarnings("deprecation")
    static RLock lock(List<RedissonClient> clients, int[] keys, boolean isOne, boolean isGroup) {
        RedissonClient client = clients.get(0);
        if (clients.size() > 1) {
            return new RedissonRedLock(clients.stream().map(each -> each.getLock("order:" + keys[0])).toArray(RLock[]::new));
        }
        if (isOne) {
            return client.getLock("order:" + keys[0]);
        }
        Stream<String> names = IntStream.of(keys).mapToObj(key -> "order:" + key);
        if (isGroup) {
            return client.getMultiLock("orders", names.collect(Collectors.toList()));
        }
        return client.getMultiLock(names.map(client::getLock).toArray(RLock[]::new));
    }

    static void unlock(RLock lock) {
        try {
            lock.unlock();
        } catch (IllegalMonitorStateException error) {
            // A server has lost its data, and the lock with it.
            if (!(lock instanceof RedissonRedLock)) {
                throw error;
            }
        }
    }

    /** For a random time with this mean, as in `src/contender.rs`. */
    static void sleep(int millis) {
        if (millis > 0) {
            LockSupport.parkNanos((long) (millis * -1e6 * Math.log(1 - ThreadLocalRandom.current().nextDouble())));
        }
    }
}
