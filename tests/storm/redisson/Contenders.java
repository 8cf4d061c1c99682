import java.util.ArrayList;
import java.util.List;
import org.redisson.Redisson;
import org.redisson.api.RLock;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/** Contenders of one lock: threads of several clients. `tests/redisson.rs` starts them. */
public class Contenders {
    private static volatile boolean isStopped;

    /** Arguments: address, name, clients, threads of each, milliseconds of a section and after it. */
    public static void main(String[] arguments) throws Exception {
        String name = arguments[1];
        int clients = Integer.parseInt(arguments[2]);
        int threads = Integer.parseInt(arguments[3]);
        long time = Long.parseLong(arguments[4]);
        List<RedissonClient> connected = new ArrayList<>();
        List<Thread> contenders = new ArrayList<>();
        for (int client = 0; client < clients; client++) {
            Config config = new Config();
            config.setThreads(2).setNettyThreads(2);
            config.useSingleServer().setAddress(arguments[0])
                .setConnectionMinimumIdleSize(1).setConnectionPoolSize(4)
                .setSubscriptionConnectionMinimumIdleSize(1).setSubscriptionConnectionPoolSize(2);
            RedissonClient redisson = Redisson.create(config);
            connected.add(redisson);
            for (int thread = 0; thread < threads; thread++) {
                RLock lock = redisson.getLock(name);
                contenders.add(new Thread(() -> contend(lock, time)));
            }
        }
        contenders.forEach(Thread::start);
        // Until the end of the input.
        while (System.in.read() >= 0) {
        }
        isStopped = true;
        for (Thread contender : contenders) {
            contender.join();
        }
        connected.forEach(RedissonClient::shutdown);
        System.out.println("end");
        System.out.flush();
        Runtime.getRuntime().halt(0);
    }

    /** Prints the start and the end of each section, in microseconds of the time of day. */
    private static void contend(RLock lock, long time) {
        while (!isStopped) {
            lock.lock();
            long start = now();
            sleep(time);
            // Before the call: another contender may start while the reply is on its way.
            long end = now();
            lock.unlock();
            sleep(time);
            synchronized (Contenders.class) {
                System.out.println(start + " " + end);
                System.out.flush();
            }
        }
    }

    private static void sleep(long time) {
        try {
            Thread.sleep(time);
        } catch (InterruptedException e) {
            throw new IllegalStateException(e);
        }
    }

    private static long now() {
        java.time.Instant now = java.time.Instant.now();
        return now.getEpochSecond() * 1_000_000 + now.getNano() / 1_000;
    }
}
